"""The submission entry, which a front end writes into the submission ring for each request.

Fields of 8 bytes come first, so that all are naturally aligned. Request parameters follow in the order of
PARAMETERS.
"""

import secrets
import struct
import zlib
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.request_parameters import INT32_MAX, INT64_MAX, INT64_RANGE, PARAMETERS, Parameter, RequestParameters
from blinkpy.queues.request_parameters import SUBMIT_NO_PREFIX_CACHE as SUBMIT_NO_PREFIX_CACHE
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT as SUBMIT_SCORE_PROMPT

STOP_IDS = 8
SQ_ENTRY_BYTES = 256
SQ_ENTRY_WORDS = SQ_ENTRY_BYTES // 4

_PARAMETERS = sorted(PARAMETERS, key=lambda p: p.dtype != "i8")  # a stable order
_SCALARS = [
    ("request_id", "<i8"),  # epoch << 32 | counter; never reused
    ("grammar_digest", "<i8"),  # digest of the grammar's content: see byte_automaton
    ("rules_digest", "<i8"),  # see token_rules
    *((p.name, f"<{p.dtype}") for p in _PARAMETERS),
    ("epoch", "<i4"),
    ("slot", "<i4"),  # slot of this queue pair; reusable once the final completion was read
    ("prompt_offset", "<i4"),  # tokens into the prompt arena
    ("prompt_length", "<i4"),  # tokens
    ("hash_offset", "<i4"),  # entries into the hash arena
    ("hash_count", "<i4"),  # full pages of the prompt
    ("grammar_offset", "<i4"),  # words into the prompt arena
    ("grammar_words", "<i4"),  # words of the packed automaton; 0 without a grammar
    ("rules_offset", "<i4"),  # words into the prompt arena
    ("rules_words", "<i4"),  # words of the packed token rules; 0 without rules
    ("predicted_tokens", "<i4"),  # tokens of the prediction, which follows the prompt in the arena
]
_USED = sum(int(dtype[-1]) for _, dtype in _SCALARS) + 4 * STOP_IDS
SQ_ENTRY = np.dtype(
    [
        *_SCALARS,
        ("stop_ids", "<i4", (STOP_IDS,)),  # including the model's end-of-sequence ids; -1: unused
        ("spare", "<i4", ((SQ_ENTRY_BYTES - _USED) // 4,)),  # 0
    ]
)
SQ_ENTRY_FIELDS = zlib.crc32(repr(SQ_ENTRY.descr).encode())  # identifies the fields of entries; part of the header

# Device code reads entries as arrays of words: WORD_NAME is a field's index in int32 [.., 64], and LONG_NAME
# the
# index of an 8-byte field in int64 [.., 32].
WORD = {name: int(place[1]) // 4 for name, place in (SQ_ENTRY.fields or {}).items()}
globals().update({f"WORD_{name.upper()}": word for name, word in WORD.items()})
globals().update({f"LONG_{name.upper()}": WORD[name] // 2 for name, dtype in _SCALARS if dtype == "<i8"})
if TYPE_CHECKING:

    def __getattr__(name: str) -> int: ...


def neutral_entries(count: int) -> NDArray[np.void]:
    """Entries with neutral parameters and no stop ids, SQ_ENTRY [count]. All other fields, including seeds,
    are 0.
    """
    entries = np.zeros(count, SQ_ENTRY)
    for p in PARAMETERS:
        entries[p.name] = p.neutral or 0
    entries["stop_ids"] = -1
    return entries


# ---- packing -----------------------------------------------------------------------------------------------------------


class ArenaPlace(NamedTuple):
    """A packed automaton, or packed token rules, in the prompt arena."""

    digest: int
    offset: int
    words: int


NOWHERE = ArenaPlace(0, 0, 0)

_CODES = {"<i8": "q", "<i4": "i", "<f4": "f"}
_PACKED = struct.Struct("<" + "".join(_CODES[dtype] for _, dtype in _SCALARS) + f"{STOP_IDS}i{SQ_ENTRY_BYTES - _USED}x")
_values_of = attrgetter(*(p.name for p in _PARAMETERS))
_SEED = [p.name for p in _PARAMETERS].index("seed")


def pack_entry(
    parameters: RequestParameters,
    request_id: int,
    *place: int,
    grammar: ArenaPlace = NOWHERE,
    rules: ArenaPlace = NOWHERE,
    predicted: int = 0,
) -> bytes:
    """A packed submission entry. A missing seed becomes random.

    place: epoch, slot, prompt offset and length, hash offset and count.
    predicted: tokens of the prediction.
    Raises ValueError for too many stop ids, or if a value overflows.
    """
    stops = parameters.stop_ids
    if len(stops) > STOP_IDS:
        raise ValueError(f"at most {STOP_IDS} stop ids fit into a submission entry, not {len(stops)}")
    values = list(_values_of(parameters))
    if values[_SEED] is None:
        values[_SEED] = secrets.randbits(63)
    try:
        digests, places = (grammar.digest, rules.digest), (*place, *grammar[1:], *rules[1:], predicted)
        return _PACKED.pack(request_id, *digests, *values, *places, *stops, *(-1,) * (STOP_IDS - len(stops)))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a request parameter does not fit into a submission entry: {error}") from error


# ---- the engine's check ------------------------------------------------------------------------------------------------


def order_key(bits: int) -> int:
    """Map a float32's bits, as int32, to an integer with the same order: -0.0 becomes -1, and 0.0 becomes 0. NaN and infinity are
    beyond all finite values.
    """
    return bits ^ INT32_MAX if bits < 0 else bits


def _check(p: Parameter) -> tuple[int, int, int, int]:
    low, high = p.accepted
    if p.is_float:
        lowest, highest = (order_key(int(np.float32(bound).view(np.int32))) for bound in p.accepted)
        return WORD[p.name], lowest + p.above_low, highest, 1
    if p.dtype == "i4":
        return WORD[p.name], int(low), int(high), 0
    if p.accepted not in ((0, INT64_MAX), INT64_RANGE):
        raise ImportError(f"{p.name}: the engine can only check the sign of an 8-byte parameter")
    return WORD[p.name] + 1, 0 if low == 0 else -INT32_MAX - 1, INT32_MAX, 0  # the word that contains the sign


# For device code, per parameter: (word, lowest key, highest key, 1 for a float).
CHECKS = tuple(_check(p) for p in PARAMETERS)
