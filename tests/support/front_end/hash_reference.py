"""Page hashes token by token, straight from their definition; blinkpy.queues.page_hash and the engine must agree."""

from collections.abc import Iterable

PRIMES = (2**31 - 1, 2**31 - 19)


def page_hashes(tokens: Iterable[int], page_size: int, multipliers: tuple[int, int], cache_salt: int = 0) -> list[int]:
    """The hash of each full page, 62 bits. Multipliers of 0, which cause collisions, are permitted here."""
    first, second, found = cache_salt % PRIMES[0], cache_salt // PRIMES[0] % PRIMES[1], []
    for position, token in enumerate(tokens, 1):
        first = (first * multipliers[0] + int(token) + 1) % PRIMES[0]
        second = (second * multipliers[1] + int(token) + 1) % PRIMES[1]
        if position % page_size == 0:
            found.append(first << 31 | second)
    return found
