"""The completion word: what the engine writes into the completion ring for one token, or for the end of a request.

Bits 0 to 15 hold the slot, 16 to 39 the token (or REJECT_*), 40 to 47 flags, 48 to 62 the lap (1 to 32,767); the sign bit
stays 0.
"""

CQ_ENTRY_BYTES = 8
TOKEN_SHIFT, FLAG_SHIFT, LAP_SHIFT = 16, 40, 48
SLOT_MASK, TOKEN_MASK, FLAG_MASK, LAP_MASK = 0xFFFF, 0xFFFFFF, 0xFF, 0x7FFF
LAPS = LAP_MASK  # laps count 1..LAPS and start over; 0 is memory that was never written

FINISH_MASK = 0x0F
FINISH_NONE = 0
FINISH_STOP = 1  # a stop id was sampled; the entry carries it
FINISH_LENGTH = 2  # max_tokens or the model's context was reached
FINISH_CANCELLED = 3
FINISH_REJECTED = 4  # the entry was not valid: the token field holds REJECT_*
FINISH_ERROR = 5  # the engine could not continue this request
FINISH_COMPLETE = 6  # the request's grammar allows nothing more: the entry's token is the output's last one
HAS_TOKEN = 0x10  # the token field is a generated token
HAS_LOGPROBS = 0x20  # and there is a record at the same position

REJECT_PROMPT = 1  # prompt empty or outside the arena
REJECT_LENGTH = 2  # prompt + max_tokens beyond max_model_len
REJECT_PAGES = 3  # can never fit into the page pool
REJECT_SLOT_BUSY = 4  # reserved: an entry for a busy slot is counted, and no word is sent, which would end the slot's owner
REJECT_HASHES = 5  # page hashes outside their arena, or not one for each full page of the prompt
REJECT_TOKEN = 6  # a prompt token is outside the vocabulary
REJECT_PARAMETER = 7  # max_tokens below 1, a value outside its range, or a prompt that is all output
REJECT_GRAMMAR = 8  # no byte automaton, or too large
REJECT_SHARE = 9  # the queue pair's requests have as many different grammars and token rules as its share holds
REJECT_RULES = 10  # no token rules, or too long


def pack_completion(slot: int, token: int, flags: int, lap: int) -> int:
    return slot | token << TOKEN_SHIFT | flags << FLAG_SHIFT | lap << LAP_SHIFT


def lap_of(position: int, cq_entries: int) -> int:
    """Lap counter of the completion at a position (entries since the segment was made)."""
    return position // cq_entries % LAPS + 1
