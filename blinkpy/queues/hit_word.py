"""The hit word: how much of a prompt the engine found in the prefix cache. Each slot of a queue pair has one.

The engine writes it when a request with hits begins to run, the first time; its front end reads it once the request's first
completion is there. Bits 0 to 39 name the request, 40 to 62 hold the hits in pages. The word is complete by itself and names its
request, so nothing relies on an order of accesses: one that comes late, or that was never written, counts as no hits.
"""

HIT_SHIFT = 40
HIT_NAME_MASK = (1 << HIT_SHIFT) - 1  # of the request id: its counter, and eight bits of the epoch
HIT_LIMIT = 1 << 63 - HIT_SHIFT  # pages; a context has less


def pack_hits(request_id: int, pages: int) -> int:
    """The word of a request. pages: below HIT_LIMIT."""
    return request_id & HIT_NAME_MASK | pages << HIT_SHIFT


def hits_of(word: int, request_id: int) -> int:
    """Pages of a request, 0 where the word is another one's."""
    return word >> HIT_SHIFT if (word ^ request_id) & HIT_NAME_MASK == 0 else 0
