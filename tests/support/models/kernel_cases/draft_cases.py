"""The kernels around a draft layer, against plain Python, for any device."""

import numpy as np
import torch
from support.models.kernel_cases.kernel_inputs import close, draw, header, ints, poison, untouched
from support.models.paged_batch import PagedBatches

from blinkpy.device.tables import map_arrays
from blinkpy.kernels.draft_tokens import DraftRows, choose_rows, following_tokens, keep_rows, take_drafts, take_stream
from blinkpy.kernels.sampling.sampler import RequestView
from blinkpy.kv.state import ROWS, TOKENS
from blinkpy.models.cpu import draft_chain

PAGE, LENGTH = 8, 64


def rows_case(rng: np.random.Generator, device: str) -> None:
    """Rows with drafts, some of them correct; rows of a scored prompt, and of a chunk. One request has a grammar."""
    slots, most = 6, 3
    batches = PagedBatches(rng, page_size=PAGE, num_pages=80, slots=slots, max_model_len=LENGTH, max_tokens=90, max_rows=20)
    work, drafts = [], dict[int, list[int]]()
    for number in range(slots):
        sequence = batches.add(rng.integers(0, 3, int(rng.integers(2, LENGTH - most))).tolist(), grammar_words=int(number == 1))
        sequence.computed = len(sequence.tokens) - 1 if number < 5 else 0
        batches.requests.prompt_length[sequence.slot] = len(sequence.tokens) + (number == 2)
        work.append((sequence, 1 if number < 5 else max(1, len(sequence.tokens) - int(rng.integers(2)))))
        if number < 4:
            drafts[sequence.slot] = rng.integers(0, 3, int(rng.integers(1, most + 1))).tolist()
    batch = batches.batch(work, drafts)
    rows = int(batch.counts[ROWS])
    batch.sampled[:rows] = rng.integers(-1, 3, rows)
    requests = batches.requests
    on_device = map_arrays(lambda array: torch.from_numpy(array.copy()).to(device), batch)
    view = RequestView(*(torch.from_numpy(getattr(requests, name)).to(device) for name in RequestView._fields))
    own = DraftRows.allocate(rows + 2, device)
    choose_rows(on_device, view, own, drafts=most, page_size=PAGE)
    chosen, last, final = draft_chain.drafting_rows(batch, requests)
    assert np.flatnonzero(own.ends[:rows].cpu()).tolist() == chosen.tolist()
    assert own.kept.cpu()[chosen].tolist() == (batch.query_starts[last + 1] - 1).tolist()
    ends = np.minimum(-(-batch.context_lengths[final] // PAGE) * PAGE, LENGTH)
    assert own.ends.cpu()[chosen].tolist() == ends.tolist()
    assert own.view.positions.cpu()[chosen].tolist() == batch.positions[batch.query_starts[last + 1] - 1].tolist()
    assert own.view.row_slots.cpu()[:rows].tolist() == batch.row_slots[:rows].tolist()
    assert own.view.cache_slots.cpu()[:rows].tolist() == [-1] * rows
    assert own.view.counts.cpu()[:3].tolist() == [rows] * 3
    tokens = int(batch.counts[TOKENS])
    out = torch.full((tokens + 5,), 77, dtype=torch.int32, device=device)
    following_tokens(on_device, view, out)
    assert out.tolist() == [*draft_chain.following_tokens(batch, requests).tolist(), *[77] * 5]


def following_case(rng: np.random.Generator, device: str, tokens: int) -> None:
    """A chunk of this number of tokens in a larger bucket; its last row emits a token."""
    length = tokens + 4
    known, first = ints(rng.integers(0, 99, (2, length)).tolist(), device), int(rng.integers(0, 3))
    bucket = tokens + 3
    batch = map_arrays(
        lambda array: torch.from_numpy(array).to(device),
        PagedBatches(rng, page_size=PAGE, num_pages=4, slots=2, max_model_len=32, max_tokens=bucket, max_rows=2).batch([]),
    )
    batch.counts[:3] = torch.tensor([1, tokens, 0])
    batch.token_rows[:tokens], batch.row_slots[0], batch.emits[0], batch.sampled[0] = 0, 1, 1, 55
    batch.query_starts[1:] = tokens
    batch.positions[:tokens] = torch.arange(first, first + tokens, dtype=torch.int32, device=device)
    out = torch.full((bucket,), 77, dtype=torch.int32, device=device)
    following_tokens(batch, RequestView(known, known, known[0]), out)
    expected = known[1, first + 1 : first + tokens].tolist() + [55]
    assert out.tolist() == expected + [77] * 3


def keep_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    """Rows in a bucket with a row more."""
    x, own, rows = draw(rng, 7, hidden, dtype=dtype, device=device), DraftRows.allocate(4, device), 3
    own.kept[:rows] = ints(rng.integers(0, 7, rows).tolist(), device)
    own.view.counts.copy_(header(rows, rows, rows, device))
    out = poison(4, hidden, dtype=dtype, device=device)
    keep_rows(x, own, out)
    assert torch.equal(out[:rows], x[own.kept[:rows].tolist()])
    untouched(out[rows:], "rows")


def stream_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    """A residual stream without and with an addend, and with two partial sums; into columns of a wider matrix."""
    for parts in (0, 1, 2):
        tokens, bucket, out = 3, 5, poison(5, 3 * hidden, dtype=dtype, device=device)
        stream = draw(rng, bucket, hidden, dtype=dtype, device=device)
        addend = draw(rng, *[2][: parts - 1], bucket, hidden, dtype=torch.float32 if parts == 2 else dtype, device=device)
        expected = stream.double() + ((addend.double().sum(0) if parts == 2 else addend.double()) if parts else 0)
        before, columns = stream.clone(), out[:, hidden : 2 * hidden]
        counts = header(tokens, tokens, tokens, device)
        take_stream(addend if parts else stream, counts, columns, stream if parts else None)
        for found in (columns, stream):
            close(found[:tokens], expected[:tokens], dtype, "sums")
        assert torch.equal(stream[tokens:], before[tokens:])
        for rest in (out[tokens:], out[:, :hidden].contiguous(), out[:, 2 * hidden :].contiguous()):
            untouched(rest, "other elements")


def take_case(rng: np.random.Generator, device: str, vocabulary: int, *, mapped: bool = False) -> None:
    """The first of equal logits wins. Rows continue, have no place for further keys, or get no draft. mapped: logits have a map
    to token ids.
    """
    rows, drafts = 5, 2
    logits = draw(rng, rows + 1, vocabulary, dtype=torch.float32, device=device)
    best = rng.integers(0, vocabulary, (rows, 2)).min(1)
    for row in range(rows):
        logits[row, int(best[row])] = logits[row, vocabulary - 1] = 50.0
    own, table = DraftRows.allocate(rows + 1, device), ints(rng.integers(0, 90, (4, LENGTH // PAGE)).tolist(), device)
    positions, slots = [5, PAGE - 1, 3, PAGE - 2, 2 * PAGE - 2], [0, 1, 2, 3, 1]
    ends = [PAGE, PAGE, 0, PAGE, 2 * PAGE]
    own.view.counts.copy_(header(rows, rows, rows, device))
    for target, values in ((own.view.positions, positions), (own.view.row_slots, slots), (own.ends, ends)):
        target[:rows] = ints(values, device)
    drafted = torch.full((rows + 1, drafts), 77, dtype=torch.int32, device=device)
    tokens = ints(rng.integers(0, 1 << 24, vocabulary).tolist(), device) if mapped else None
    take_drafts(logits, table, own, drafted, number=1, page_size=PAGE, tokens=tokens)
    best = best if tokens is None else tokens.cpu().numpy()[best]
    assert drafted[:, 0].tolist() == [77] * (rows + 1)
    assert drafted[:, 1].tolist() == [*(int(b) if end else -1 for b, end in zip(best, ends, strict=True)), 77]
    goes_on = [position + 1 < end for position, end in zip(positions, ends, strict=True)]
    after = [position + go for position, go in zip(positions, goes_on, strict=True)]
    assert own.view.positions[:rows].tolist() == after
    assert own.ends[:rows].tolist() == [end if go else 0 for end, go in zip(ends, goes_on, strict=True)]
    places = [int(table[slot, at // PAGE]) * PAGE + at % PAGE for slot, at in zip(slots, after, strict=True)]
    assert own.view.cache_slots[:rows].tolist() == [place if go else -1 for place, go in zip(places, goes_on, strict=True)]
    assert [n for n, go in zip(own.view.context_lengths[:rows].tolist(), goes_on, strict=True) if go] == [
        at + 1 for at, go in zip(after, goes_on, strict=True) if go
    ]
    assert own.tokens[:rows].tolist() == best.tolist()
