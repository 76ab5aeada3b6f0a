"""Token rules on the GPU: biases, allowed tokens and banned sequences of one row. Their form: blinkpy/queues/token_rules.py."""

import triton
import triton.language as tl

from blinkpy.queues import token_rules

BIASES_WORD = tl.constexpr(token_rules.BIASES_WORD)
SEQUENCES_WORD = tl.constexpr(token_rules.SEQUENCES_WORD)
BITMASK_WORD = tl.constexpr(token_rules.BITMASK_WORD)
FIRST_WORD = tl.constexpr(token_rules.FIRST_WORD)
SEQUENCE_TOKENS = tl.constexpr(token_rules.SEQUENCE_TOKENS)
ANY_TOKEN = tl.constexpr(token_rules.ANY_TOKEN)
BITS_SHIFT = tl.constexpr(token_rules.BITS_SHIFT)

BIAS_BLOCK = tl.constexpr(256)
SEQUENCE_BLOCK = tl.constexpr(32)


@triton.jit(noinline=True)  # so that it takes no registers from rows without rules
def apply_rules(
    row_ptr,  # float32 [V] logits of the row
    out_ptr,  # float32 [V] result
    first_id,  # the first token of this program
    vocabulary,  # V
    rules_ptr,  # int32 [W] packed token rules
    history_ptr,  # int32 [L] prompt and output of the request
    begin,  # of the output
    length,  # of prompt and output
    TOKENS: tl.constexpr,  # of this program
):
    """The logits of this program's tokens under the rules of the row. Each token of a program is written by it alone."""
    biases, sequences = tl.load(rules_ptr + BIASES_WORD), tl.load(rules_ptr + SEQUENCES_WORD)
    ids_ptr = rules_ptr + FIRST_WORD
    banned_ptr = ids_ptr + 2 * biases
    bits_ptr = banned_ptr + SEQUENCE_TOKENS * sequences
    ids = first_id + tl.arange(0, TOKENS)
    inside = ids < vocabulary
    logit = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    bits = tl.load(bits_ptr + (ids >> BITS_SHIFT), mask=inside & (tl.load(rules_ptr + BITMASK_WORD) > 0), other=-1)
    logit = tl.where((bits >> (ids & 31)) & 1 != 0, logit, float("-inf"))
    tl.store(out_ptr + ids, logit, mask=inside)
    tl.debug_barrier()  # other threads of the program load what was stored
    for first in range(0, biases, BIAS_BLOCK):
        index = first + tl.arange(0, BIAS_BLOCK)
        token = tl.load(ids_ptr + index, mask=index < biases, other=-1)
        own = (token >= first_id) & (token < first_id + TOKENS) & (token < vocabulary)
        bias = tl.load(ids_ptr + biases + index, mask=own, other=0).to(tl.float32, bitcast=True)
        tl.store(out_ptr + token, tl.load(out_ptr + token, mask=own, other=0.0) + bias, mask=own)
    tl.debug_barrier()
    for first in range(0, sequences, SEQUENCE_BLOCK):
        sequence, i = first + tl.arange(0, SEQUENCE_BLOCK), tl.arange(0, SEQUENCE_TOKENS)
        exists = (sequence < sequences)[:, None]
        tokens = tl.load(banned_ptr + sequence[:, None] * SEQUENCE_TOKENS + i[None, :], mask=exists, other=ANY_TOKEN)
        last = i[None, :] == SEQUENCE_TOKENS - 1
        position = length - (SEQUENCE_TOKENS - 1) + i
        known = tl.load(history_ptr + position, mask=(position >= begin) & (position < length), other=ANY_TOKEN)
        differs = (tokens != ANY_TOKEN) & (tokens != known[None, :]) & ~last
        banned = tl.max(tl.where(last, tokens, ANY_TOKEN), 1)
        met = (tl.max(differs.to(tl.int32), 1) == 0) & (banned >= first_id) & (banned < first_id + TOKENS)
        tl.store(out_ptr + banned, tl.zeros_like(banned).to(tl.float32) + float("-inf"), mask=met & (banned < vocabulary))
    tl.debug_barrier()
