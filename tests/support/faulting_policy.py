"""A policy with faults of each kind, for some requests. Not a test; engines of tests load it as a file."""

TABLE = (3, 1, 4)


def share(request):
    total = 0
    for i in range(request.priority):
        total += i << request.pair
    return total


def rank(request):
    if request.generated > 2:
        return TABLE[request.prompt_length]
    if request.prompt_length % 5 == 2:
        return 1 << 60 + request.max_tokens
    return 100 // (request.prompt_length % 3) + share(request)
