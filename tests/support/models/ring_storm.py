"""Steps that test window rings: long sequences, chunks of every length, preemptions, and reused slots."""

from collections.abc import Iterator

import numpy as np
from support.models.paged_batch import PagedBatches, Sequence

from blinkpy.kv.state import Batch


def ring_storm(
    rng: np.random.Generator, batches: PagedBatches, vocab: int, *, longest: int, new_tokens: int, rows: int, tokens: int,
    prompts: int = 10,
) -> Iterator[Batch]:  # fmt: skip
    """Batches until all prompts have their new tokens; the caller writes the `sampled` token of each row that emits. longest:
    tokens of the longest prompt. rows, tokens: tokens of the largest batch."""
    lengths = [longest, 1, *rng.integers(1, longest + 1, prompts - 2).tolist()]
    waiting, running, preempted = [rng.integers(0, vocab, length).tolist() for length in lengths], list[Sequence](), 0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(batches.add(waiting.pop()))
        if rng.random() < 0.1 and preempted < 4:
            batches.preempt(running[int(rng.integers(len(running)))])
            preempted += 1
        work, budget = [], tokens
        for sequence in [running[index] for index in rng.permutation(len(running))]:
            left = len(sequence.tokens) - sequence.computed
            count = min(left, budget, int(rng.choice([1, int(rng.integers(1, 30)), tokens])))
            if count and (left == 1 or rng.random() < 0.8):
                budget -= count
                work.append((sequence, count))
        if work:
            batch = batches.batch(work)
            yield batch
            batches.commit(batch)
        for sequence in [one for one in running if len(one.tokens) - one.prompt_length >= new_tokens]:
            running.remove(sequence)
            batches.free += sequence.pages
            batches.free_slots.insert(int(rng.integers(len(batches.free_slots) + 1)), sequence.slot)
