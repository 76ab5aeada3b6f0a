"""Computes drafts after sampling on the CPU, by the model's draft layer or its draft head.

For each token of the batch, the draft layer reads the model's result and the next token, and predicts the token after that. So
its keys and values at a position also depend on the next token. The layer runs over the whole batch, then once per further draft,
with its own result and the previous draft.

The keys and values of drafts are written after the request's tokens, up to the end of its last page in the batch. The next step
overwrites them. The last key of a cached page may belong to a different next token, which costs at most one correct draft.

A draft head does the same with the residual stream at several layers instead of the model's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch, Requests

if TYPE_CHECKING:
    import torch

    from blinkpy.models.cpu.draft_head import DraftHead
    from blinkpy.models.cpu.torch_decoder import TorchDecoder

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class DraftChain:
    """The draft layer of a decoder, or a draft head.

    max_model_len: largest context, tokens.
    page_size: tokens of a page of the cache.
    drafts: the maximum for each row; 0: only keys and values are written.
    """

    def __init__(self, decoder: TorchDecoder | DraftHead, max_model_len: int, page_size: int, drafts: int):
        self.decoder = decoder
        self.max_model_len, self.page_size, self.drafts = max_model_len, page_size, drafts

    def run(self, batch: Batch, requests: Requests, hidden: torch.Tensor) -> None:
        """Write batch.drafted for all rows of a computed batch, whose batch.sampled is known.

        hidden: the model's normalised result, or a head's first inputs, [tokens, hidden].

        A row has -1 after its drafts. Rows of drafts, and scored prompts, have no drafts.
        """
        batch.drafted[: int(batch.counts[S.ROWS])] = -1
        rows, last, final = drafting_rows(batch, requests)
        if self.drafts == 0:
            rows, last, final = rows[:0], last[:0], final[:0]
        tokens = batch.query_starts[last + 1].astype(np.int64) - 1
        following = following_tokens(batch, requests)
        found, result = self.decoder.draft(batch, requests.page_table, following, hidden, tokens)
        slots, positions = batch.row_slots[rows], batch.positions[tokens]
        ends = -(-batch.context_lengths[final] // self.page_size) * self.page_size
        ends = np.minimum(ends, self.max_model_len)
        for count in range(self.drafts):
            batch.drafted[rows, count] = found
            positions = positions + 1
            goes_on = positions < ends
            if count + 1 == self.drafts or not goes_on.any():
                return
            rows, slots, positions, ends = rows[goes_on], slots[goes_on], positions[goes_on], ends[goes_on]
            further = self._further(requests.page_table, slots, positions)
            every = np.arange(len(rows))
            found, result = self.decoder.draft(further, requests.page_table, found[goes_on], result[goes_on], every)

    def _further(self, page_table: Int32, slots: Int32, positions: Int32) -> Batch:
        """A batch of one token at a position of each slot."""
        count = len(slots)
        pages = page_table[slots, positions // self.page_size]
        places = (pages * self.page_size + positions % self.page_size).astype(np.int32)
        starts, none = np.arange(count + 1, dtype=np.int32), np.zeros((0, 1), np.int64)
        counts = np.zeros(S.BATCH_COUNTS, np.int64)
        counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS, S.MAX_CONTEXT, S.GROUPS]] = count, count, count, positions.max() + 1, 1
        zeros = np.zeros(count, np.int32)
        at = np.ascontiguousarray(positions, np.int32)
        return Batch(zeros, at, places, starts[:-1], slots, starts, at + 1, zeros, zeros, none, counts, zeros[:, None])


def following_tokens(batch: Batch, requests: Requests) -> Int32:
    """The token after each token of a computed batch, int32 [tokens]: the sampled token after an emitting row."""
    rows, tokens = int(batch.counts[S.ROWS]), int(batch.counts[S.TOKENS])
    slots, positions = batch.row_slots[batch.token_rows[:tokens]], batch.positions[:tokens]
    result: Int32 = requests.tokens[slots, np.minimum(positions + 1, requests.tokens.shape[1] - 1)]
    emits = batch.emits[:rows] != 0
    result[batch.query_starts[1 : rows + 1][emits] - 1] = np.maximum(batch.sampled[:rows][emits], 0)  # -1 if its step failed
    return result


def drafting_rows(batch: Batch, requests: Requests) -> tuple[Int64, Int64, Int64]:
    """(rows of the requests that may have drafts, ascending; row of each request's last correct draft; row of its last draft).
    Without such a draft, the row is the request's own.
    """
    rows = int(batch.counts[S.ROWS])
    emits, slots, sampled = batch.emits[:rows], batch.row_slots[:rows], batch.sampled[:rows]
    own = np.flatnonzero((emits == 1) & (batch.context_lengths[:rows] >= requests.prompt_length[slots]))
    last, final = own.copy(), own.copy()
    for i, row in enumerate(own.tolist()):
        end = row
        while end + 1 < rows and emits[end + 1] == S.DRAFT:
            end += 1
        while row < end and sampled[row] == batch.token_ids[batch.query_starts[row + 1]]:
            row += 1
        last[i], final[i] = row, end
    return own, last, final
