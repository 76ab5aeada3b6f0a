"""Grammars on the GPU: tokens that the grammar of a row does not allow next get the logit -inf.

Each token's bytes are run through the automaton from the row's state; blinkpy/kv/grammars.py does the same
for one token. Most tokens end with their first byte, so a block stops as soon as all of its tokens are
decided.
"""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.queues import byte_automaton, submission

CLASSES_WORD = tl.constexpr(byte_automaton.CLASSES_WORD)
CLASS_OF_BYTE = tl.constexpr(4 * byte_automaton.CLASS_OF_WORD)
FIRST_CELL = tl.constexpr(2 * byte_automaton.CELLS_WORD)
STATE_ACCEPTING = tl.constexpr(byte_automaton.STATE_ACCEPTING)
WORD_STOP_IDS = tl.constexpr(submission.WORD_STOP_IDS)
STOP_IDS = tl.constexpr(submission.STOP_IDS)

MASK_BLOCK = 512
"""Tokens that are processed together: two per thread."""
BYTES_AT_ONCE = tl.constexpr(4)


class GrammarView(NamedTuple):
    """The grammars and token rules (G slots of W words) and the fields of S requests that the sampler reads
    (kv/state.py).
    """

    words: torch.Tensor  # int32 [G, W] packed automata and token rules
    token_place: torch.Tensor  # int32 [V, 2] first word and number of bytes of each token
    token_bytes: torch.Tensor  # int32 [n]
    slot: torch.Tensor  # int32 [S] slot of the request's automaton
    state: torch.Tensor  # int32 [S] its state
    rules: torch.Tensor  # int32 [S] slot of the request's token rules

    @classmethod
    def of(cls, grammars: Any, requests: Any) -> Self:
        """The view of a `kv.state.Grammars` and a `kv.state.Requests` of tensors."""
        own = requests.grammar, requests.grammar_state, requests.rules
        return cls(grammars.words, grammars.token_place, grammars.token_bytes, *own)


@triton.jit
def walk(
    ids,  # int32 [BLOCK] tokens
    inside,  # bool [BLOCK] they exist
    state,  # of the automaton
    words_ptr,  # int32 [W] packed automaton
    classes_ptr,  # uint8 [4 W] the same memory
    cells_ptr,  # int16 [2 W] the same memory
    token_place_ptr,  # int64 [V] first word | number of bytes << 32
    token_bytes_ptr,  # int32 [n]
):
    """Whether the bytes of each token lead on from a state; no bytes lead nowhere. bool [BLOCK]."""
    row = 1 + tl.load(words_ptr + CLASSES_WORD)
    place = tl.load(token_place_ptr + ids, mask=inside, other=0)
    first, length = place.to(tl.int32), (place >> 32).to(tl.int32)
    alive = length > 0
    at = tl.zeros_like(ids) + state
    done = tl.zeros([], tl.int32)
    longest = tl.max(length, 0)
    while done < longest:
        word = tl.load(token_bytes_ptr + first + (done >> 2), mask=alive & (done < length), other=0)
        for i in tl.static_range(BYTES_AT_ONCE):
            moving = alive & (done + i < length)
            byte = (word >> (8 * i)) & 0xFF
            kind = tl.load(classes_ptr + CLASS_OF_BYTE + byte, mask=moving, other=0).to(tl.int32)
            following = tl.load(cells_ptr + FIRST_CELL + at * row + 1 + kind, mask=moving, other=0).to(tl.int32)
            at = tl.where(moving, following, at)
            alive = alive & (at >= 0)
        done += BYTES_AT_ONCE
        longest = tl.max(tl.where(alive, length, 0), 0)
    return alive


@triton.jit(noinline=True)  # so that it takes no registers from rows without a grammar
def mask_illegal(
    row_ptr,  # float32 [V] logits of the row
    first_id,  # the first token of this program
    vocabulary,  # V
    entry_ptr,  # int32 [64] submission entry
    grammar, state,  # slot and state of its automaton
    words_ptr,  # int32 [G, W]
    classes_ptr,  # uint8 [G, 4 W] the same memory
    cells_ptr,  # int16 [G, 2 W] the same memory
    width,  # W
    token_place_ptr,  # int64 [V]
    token_bytes_ptr,  # int32 [n]
    TOKENS: tl.constexpr,  # of this program
    BLOCK: tl.constexpr,
):  # fmt: skip
    """-inf for tokens that are not legal, in place. A stop id is legal where the output may end."""
    offset = grammar.to(tl.int64) * width
    words_ptr, classes_ptr, cells_ptr = words_ptr + offset, classes_ptr + 4 * offset, cells_ptr + 2 * offset
    flags = tl.load(cells_ptr + FIRST_CELL + state * (1 + tl.load(words_ptr + CLASSES_WORD))).to(tl.int32)
    accepting = (flags & STATE_ACCEPTING) != 0
    for first in range(0, TOKENS, BLOCK):
        ids = first_id + first + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        legal = walk(ids, inside, state, words_ptr, classes_ptr, cells_ptr, token_place_ptr, token_bytes_ptr)
        for i in tl.static_range(STOP_IDS):
            legal = tl.where(ids == tl.load(entry_ptr + WORD_STOP_IDS + i), accepting, legal)
        tl.store(row_ptr + ids, float("-inf"), mask=inside & ~legal)
    tl.debug_barrier()  # other threads of the program load what was stored
