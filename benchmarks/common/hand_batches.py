"""Handmade batches in the GPU's memory, for replays of a step graph without a scheduler."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.harness import UsageError
from blinkpy.kv.state import BATCH_COUNTS, DECODE_ROWS, EMITS, MAX_CONTEXT, ROWS, TOKENS
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.queues.submission import WORD_TEMPERATURE, neutral_entries

Int32 = NDArray[np.int32]


class Rows(NamedTuple):
    """The rows of a step: new tokens, and context including them. Decode rows, with one token, come first."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def decodes(self) -> int:
        return self.lengths.count(1)

    @property
    def mixed(self) -> bool:
        """Whether there are prefill chunks."""
        return self.tokens > len(self.lengths)


def decoding(rows: int, context: int) -> Rows:
    """A step with only decode rows."""
    return Rows((1,) * rows, (context,) * rows)


def prompts(count: int, length: int) -> Rows:
    """A step with only whole prompts."""
    return Rows((length,) * count, (length,) * count)


def mixed(decodes: int, context: int, chunk: int, cached: int = 0) -> Rows:
    """Decode rows at a context, and one chunk of a prompt after its cached tokens."""
    return Rows((1,) * decodes + (chunk,), (context,) * decodes + (cached + chunk,))


def page_table(rows: Rows, page_size: int, pages: Int32, width: int) -> Int32:
    """Page table int32 [rows, width]: each row takes the pages for its context, in order; then -1.

    Raises UsageError if there are too few pages, and ValueError if the width is too small for a context.
    """
    needed = [-(-context // page_size) for context in rows.contexts]
    if sum(needed) > len(pages):
        raise UsageError(
            f"the KV cache has {len(pages)} pages; a step with {sum(rows.contexts)} tokens of context needs {sum(needed)}"
        )
    if max(needed) > width:
        raise ValueError(f"a context of {max(rows.contexts)} tokens in a page table of {width} pages")
    table, taken = np.full((len(needed), width), -1, np.int32), 0
    for row, count in enumerate(needed):
        table[row, :count] = pages[taken : taken + count]
        taken += count
    return table


def batch_arrays(rows: Rows, table: Int32, page_size: int, most_rows: int, token_ids: Int32) -> dict[str, NDArray]:
    """Arrays of blinkpy.kv.state.Batch with the scheduler's padding. Row i is request slot i, and all rows
    emit.

    table: of page_table().
    token_ids: int32 [T], the maximum of a batch.
    Raises ValueError for too many rows or tokens.
    """
    count, most_tokens = len(rows.lengths), len(token_ids)
    if count > most_rows or rows.tokens > most_tokens:
        raise ValueError(f"{count} rows of {rows.tokens} tokens, where {most_rows} and {most_tokens} fit")
    lengths, contexts = np.array(rows.lengths), np.array(rows.contexts)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(count), lengths)
    position = np.arange(rows.tokens) - starts[row] + (contexts - lengths)[row]
    slot = table[row, position // page_size] * page_size + position % page_size

    def padded(values: NDArray, size: int, padding: int) -> Int32:
        return np.pad(values.astype(np.int32), (0, size - len(values)), constant_values=padding)

    counts = np.zeros(BATCH_COUNTS, np.int64)
    counts[[ROWS, TOKENS, DECODE_ROWS, EMITS]] = count, rows.tokens, rows.decodes, count
    counts[MAX_CONTEXT] = contexts.max()
    return {
        "token_ids": padded(token_ids[: rows.tokens], most_tokens, 0),
        "positions": padded(position, most_tokens, 0),
        "cache_slots": padded(slot, most_tokens, -1),
        "token_rows": padded(row, most_tokens, -1),
        "row_slots": padded(np.arange(count), most_rows, -1),
        "query_starts": padded(starts, most_rows + 1, rows.tokens),
        "context_lengths": padded(contexts, most_rows, 0),
        "emits": padded(np.ones(count), most_rows, 0),
        "counts": counts,
    }


def put(state: Any, rows: Rows, page_size: int, pages: Int32, vocab_size: int, seed: int = 1) -> None:
    """Write a batch of random tokens, with greedy decoding, to the state in the GPU's memory (tensors instead
    of arrays).

    pages: of the pool, in the order of use. The content of the cached context is unchanged.
    """
    batch, requests = state.batch, state.requests
    token_ids = np.random.default_rng(seed).integers(0, vocab_size, len(batch.token_ids), dtype=np.int32)
    table = page_table(rows, page_size, pages, requests.page_table.shape[1])
    for name, array in batch_arrays(rows, table, page_size, len(batch.row_slots), token_ids).items():
        getattr(batch, name).copy_(torch.from_numpy(array))
    requests.page_table[: len(table)] = torch.from_numpy(table).to(requests.page_table.device)
    neutral = torch.from_numpy(neutral_entries(1).view(np.int32))
    requests.entry[:] = neutral.to(requests.entry.device)
    requests.entry[:, WORD_TEMPERATURE] = 0  # greedy


def graph_index(step: GpuStep, rows: Rows) -> int:
    """Index of the smallest graph that holds the rows, as chosen by the scheduler. Raises ValueError without
    such a graph.
    """
    count = len(rows.lengths)
    for index, shape in enumerate(step.shapes):
        if shape.mixed == rows.mixed and shape.tokens >= rows.tokens and shape.rows >= count:
            return index
    raise ValueError(f"no step graph holds {count} rows of {rows.tokens} tokens")
