"""The hit word reports prefix-cache hits and waiting time of a request. Each slot of a queue pair has one.

The engine writes it when a request begins to run, the first time; its front end reads it once the request's
first completion is there. Bits 0 to 21 name the request, 22 to 41 hold how long it waited in the engine, in
units of 2**20 ns, and 42 to 62 the number of its prompt's pages that were in the prefix cache. The word is
complete by itself and names its request, so nothing relies on the order of accesses: a late word counts as
no hits. Two requests of a slot have the same name only if four million others came between them.
"""

NAME_BITS = 22
NAME_MASK = (1 << NAME_BITS) - 1
HIT_SHIFT = 42
HIT_LIMIT = 1 << 63 - HIT_SHIFT  # pages; a context has less
WAIT_SHIFT = 20  # from ns to the unit of waits, about a millisecond
WAIT_LIMIT = 1 << HIT_SHIFT - NAME_BITS  # units; longer waits count as WAIT_LIMIT - 1


def name_of(request_id: int) -> int:
    """The name of a request: all bits of its id, folded, so that neighbours and epochs differ."""
    return (request_id ^ request_id >> NAME_BITS ^ request_id >> 2 * NAME_BITS) & NAME_MASK


def pack_hits(request_id: int, pages: int, waited_ns: int = 0) -> int:
    """The word of a request. pages: below HIT_LIMIT."""
    return name_of(request_id) | min(waited_ns >> WAIT_SHIFT, WAIT_LIMIT - 1) << NAME_BITS | pages << HIT_SHIFT


def hits_of(word: int, request_id: int) -> int:
    """Pages of a request, 0 where the word is another one's."""
    return word >> HIT_SHIFT if word & NAME_MASK == name_of(request_id) else 0


def wait_of(word: int, request_id: int) -> int:
    """How long a request waited, ns; -1 where the word is another one's."""
    return (word >> NAME_BITS & WAIT_LIMIT - 1) << WAIT_SHIFT if word & NAME_MASK == name_of(request_id) else -1
