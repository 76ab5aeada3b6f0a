"""The submission entry: what a front end writes into the submission ring for one request."""

from __future__ import annotations

import numpy as np

STOP_IDS = 8

SQ_ENTRY = np.dtype(
    [
        ("request_id", "<i8"),  # epoch << 32 | counter: never used twice
        ("seed", "<i8"),  # of the request's random numbers
        ("cache_salt", "<i8"),  # >= 0; prefixes are shared only among requests with the same salt
        ("epoch", "<i4"),
        ("slot", "<i4"),  # of this queue pair; free again once the final completion was read
        ("prompt_offset", "<i4"),  # tokens into the prompt arena
        ("prompt_length", "<i4"),  # tokens
        ("hash_offset", "<i4"),  # entries into the hash arena
        ("hash_count", "<i4"),  # full pages of the prompt
        ("max_tokens", "<i4"),
        ("min_tokens", "<i4"),  # stop ids are ignored before so many tokens
        ("priority", "<i4"),  # lower is served first, under the policies that look at it
        ("flags", "<i4"),  # SUBMIT_*
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("repetition_penalty", "<f4"),  # 1: off
        ("presence_penalty", "<f4"),  # 0: off
        ("frequency_penalty", "<f4"),  # 0: off
        ("logprobs", "<i4"),  # most likely tokens that are reported beside the sampled one, 0 to TOP_LOGPROBS; -1: off
        ("stop_ids", "<i4", (STOP_IDS,)),  # -1: unused; the model's end-of-sequence ids are among them
    ]
)
SQ_ENTRY_BYTES = SQ_ENTRY.itemsize
SQ_ENTRY_WORDS = SQ_ENTRY_BYTES // 4

SUBMIT_NO_PREFIX_CACHE = 1  # neither reuse nor offer pages


def _word(name: str) -> int:
    """Index of a field in the entry seen as int32 words."""
    return int(SQ_ENTRY.fields[name][1]) // 4  # type: ignore[index]


# Device code reads entries as arrays of words: int32 [.., 32], and int64 [.., 16] for the first three fields.
LONG_REQUEST_ID, LONG_SEED, LONG_CACHE_SALT = (_word(n) // 2 for n in ("request_id", "seed", "cache_salt"))
WORD_SEED = _word("seed")
WORD_EPOCH = _word("epoch")
WORD_SLOT = _word("slot")
WORD_PROMPT_OFFSET = _word("prompt_offset")
WORD_PROMPT_LENGTH = _word("prompt_length")
WORD_HASH_OFFSET = _word("hash_offset")
WORD_HASH_COUNT = _word("hash_count")
WORD_MAX_TOKENS = _word("max_tokens")
WORD_MIN_TOKENS = _word("min_tokens")
WORD_PRIORITY = _word("priority")
WORD_FLAGS = _word("flags")
WORD_TEMPERATURE = _word("temperature")
WORD_TOP_P = _word("top_p")
WORD_MIN_P = _word("min_p")
WORD_TOP_K = _word("top_k")
WORD_REPETITION_PENALTY = _word("repetition_penalty")
WORD_PRESENCE_PENALTY = _word("presence_penalty")
WORD_FREQUENCY_PENALTY = _word("frequency_penalty")
WORD_LOGPROBS = _word("logprobs")
WORD_STOP_IDS = _word("stop_ids")
