"""Hand-made batches for tests of models and kernels: they turn sequences of tokens into the scheduler's arrays.

They use no code of the scheduler. Pages are placed at random, so that a kernel that assumes an order fails.
"""

from dataclasses import dataclass, field

import numpy as np

from blinkpy.kv.state import BATCH_COUNTS, DECODE_ROWS, DRAFT, EMITS, MAX_CONTEXT, ROWS, TOKENS, Batch, Requests
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_WORDS, neutral_entries
from blinkpy.queues.words import LOGPROB_ENTRIES


@dataclass
class Sequence:
    """One request. tokens: prompt and output so far. computed: tokens whose keys and values are in the cache."""

    slot: int
    tokens: list[int]
    prompt_length: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    def decodes(self, count: int) -> bool:
        return count == 1 and self.computed >= self.prompt_length


class PagedBatches:
    """A page pool and request slots, and batches over them."""

    def __init__(
        self, rng: np.random.Generator, *, page_size: int, num_pages: int, slots: int, max_model_len: int, max_tokens: int,
        max_rows: int,
    ):  # fmt: skip
        self.rng, self.page_size, self.max_tokens, self.max_rows = rng, page_size, max_tokens, max_rows
        self.free = rng.permutation(num_pages).tolist()
        self.free_slots = rng.permutation(slots).tolist()
        none = {name: np.zeros(0) for name in Requests._fields}
        arrays = {
            "page_table": np.full((slots, -(-max_model_len // page_size)), -1, np.int32),
            "tokens": np.zeros((slots, max_model_len), np.int32),
            "length": np.zeros(slots, np.int32),
            "computed": np.zeros(slots, np.int32),
            "prompt_length": np.zeros(slots, np.int32),
            "entry": np.zeros((slots, SQ_ENTRY_WORDS), np.int32),
            "snapshot_source": np.full(slots, -1, np.int32),
            "snapshot_target": np.full(slots, -1, np.int32),
        }
        self.requests = Requests(**(none | arrays))
        self.step_drafts = 1  # width of Batch.drafted

    def add(self, tokens: list[int], *, share: Sequence | None = None, share_pages: int = 0, **parameters: float) -> Sequence:
        """A new request with a prompt. share: a sequence whose first pages it reuses, as after a hit in the prefix cache.

        parameters: fields of submission.SQ_ENTRY; by default greedy and without filters.
        """
        sequence = Sequence(self.free_slots.pop(), list(tokens), len(tokens))
        if share is not None:
            sequence.pages = share.pages[:share_pages]
            sequence.computed = share_pages * self.page_size
            assert share.computed >= sequence.computed
            assert share.tokens[: sequence.computed] == tokens[: sequence.computed]
        self.requests.entry[sequence.slot] = neutral_entries(1).view(np.int32)
        entry = self.requests.entry[sequence.slot].view(SQ_ENTRY)[0]
        for name, value in {"temperature": 0, **parameters}.items():
            entry[name] = value
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages; all tokens are recomputed later."""
        self.free = sequence.pages + self.free
        sequence.pages, sequence.computed = [], 0

    def batch(self, work: list[tuple[Sequence, int]], drafts: dict[int, list[int]] | None = None) -> Batch:
        """A step that computes the next `count` tokens of each sequence. Decode rows come first, as in the scheduler's batches.

        drafts: by slot, of sequences that decode. Each draft is a row after the row of its sequence. These
        rows follow all decode rows.

        A row emits if it computes the sequence's last known token. Entries after the rows get garbage values if the contract
        permits it.
        """
        self.drafts = drafts or {}
        work = sorted(work, key=lambda item: not item[0].decodes(item[1]) or item[0].slot in self.drafts)
        decode_rows = sum(sequence.decodes(count) and sequence.slot not in self.drafts for sequence, count in work)
        rows = [(one, count, 0) for one, count in work if one.slot not in self.drafts]
        rows += [(one, 1, k) for one, _ in work for k in range(1 + len(self.drafts.get(one.slot, ()))) if one.slot in self.drafts]
        batch = Batch(
            token_ids=np.zeros(self.max_tokens, np.int32),
            positions=np.zeros(self.max_tokens, np.int32),
            cache_slots=np.full(self.max_tokens, -1, np.int32),
            token_rows=np.full(self.max_tokens, -1, np.int32),
            row_slots=np.full(self.max_rows, -1, np.int32),
            query_starts=np.zeros(self.max_rows + 1, np.int32),
            context_lengths=np.zeros(self.max_rows, np.int32),
            emits=np.zeros(self.max_rows, np.int32),
            sampled=self.rng.integers(-(2**31), 2**31, self.max_rows).astype(np.int32),
            logprobs=self.rng.integers(-(2**63), 2**63, (self.max_rows, LOGPROB_ENTRIES)),
            counts=np.zeros(BATCH_COUNTS, np.int64),
            drafted=np.full((self.max_rows, self.step_drafts), -1, np.int32),
        )
        at = 0
        for row, (sequence, count, draft) in enumerate(rows):
            first, end = sequence.computed + draft, sequence.computed + draft + count
            tokens = sequence.tokens + self.drafts.get(sequence.slot, [])
            assert end <= len(tokens)
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free.pop())
            slot = sequence.slot
            self.requests.page_table[slot] = -1
            self.requests.page_table[slot, : len(sequence.pages)] = sequence.pages
            self.requests.tokens[slot, : len(tokens)] = tokens
            self.requests.length[slot] = len(sequence.tokens)
            self.requests.computed[slot] = sequence.computed
            self.requests.prompt_length[slot] = sequence.prompt_length
            positions = np.arange(first, end)
            span = slice(at, at + count)
            batch.token_ids[span] = tokens[first:end]
            batch.positions[span] = positions
            pages = np.array(sequence.pages)[positions // self.page_size]
            batch.cache_slots[span] = pages * self.page_size + positions % self.page_size
            batch.token_rows[span] = row
            batch.row_slots[row] = slot
            batch.query_starts[row] = at
            batch.context_lengths[row] = end
            batch.emits[row] = DRAFT if draft > 0 else end == len(sequence.tokens)
            at += count
        batch.query_starts[len(rows) :] = at
        batch.counts[[ROWS, TOKENS, DECODE_ROWS]] = len(rows), at, decode_rows
        batch.counts[MAX_CONTEXT] = batch.context_lengths.max()
        batch.counts[EMITS] = (batch.emits > 0).sum()
        self.rows = [sequence for sequence, _, _ in rows]
        self.work = [(sequence, count) for sequence, count, _ in rows]
        self._row_drafts = [draft for _, _, draft in rows]
        return batch

    def commit(self, batch: Batch) -> None:
        """Apply the results of the last batch: mark tokens as computed, and append sampled tokens up to the first wrong draft."""
        for row, ((sequence, count), draft) in enumerate(zip(self.work, self._row_drafts, strict=True)):
            if draft > 0 and sequence.computed + 1 != batch.context_lengths[row]:
                continue
            if draft > 0 and sequence.tokens[-1] != self.drafts[sequence.slot][draft - 1]:
                continue
            sequence.computed += count
            if batch.emits[row]:
                sequence.tokens.append(int(batch.sampled[row]))
