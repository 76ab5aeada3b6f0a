"""Cases of gated delta nets: the convolution, the recurrence and the gate, against NumPy in float64."""

from typing import NamedTuple

import numpy as np
import torch

from blinkpy.kernels.activation import gate_output
from blinkpy.kernels.delta.drafted_rows import FEWEST, hold
from blinkpy.kernels.delta.recurrence import DeltaSizes, DraftedStates, recur
from blinkpy.kernels.delta.short_convolution import convolve
from blinkpy.kernels.delta.state_copies import copy_states
from blinkpy.kernels.launch import BatchView

SLOTS, EPS = 7, 1e-5


class Rows(NamedTuple):
    """Rows of a batch: their tokens, whether their sequences are new, and their slots."""

    counts: list[int]
    fresh: list[bool]
    slots: list[int]

    @property
    def starts(self) -> list[int]:
        return [0, *np.cumsum(self.counts).tolist()]

    def view(self, padded: int, device: str) -> BatchView:
        """The rows as a batch. padded: rows of the bucket."""
        more = padded - len(self.counts)
        context = [count + (0 if new else 3) for count, new in zip(self.counts, self.fresh, strict=True)]
        ints = [self.slots + [-1] * more, self.starts + [self.starts[-1]] * more, context + [0] * more]
        slots, starts, contexts = (torch.tensor(values, dtype=torch.int32, device=device) for values in ints)
        header = torch.tensor([len(self.counts), self.starts[-1], 0, 0, 0, 0, 0, 0], device=device)
        return BatchView(header, slots, starts, contexts, slots, slots, slots)


def drawn_rows(rng: np.random.Generator, longest: int) -> Rows:
    counts = [1, *rng.integers(1, longest + 1, 2).tolist(), longest]
    return Rows(counts, [True, False, True, False], rng.permutation(SLOTS)[:4].tolist())


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """A float64 copy."""
    return tensor.double().cpu().numpy().copy()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def relative(found: torch.Tensor, wanted: np.ndarray) -> float:
    """The largest error, as a share of the largest number."""
    return float(np.abs(numbers(found) - wanted).max() / np.abs(wanted).max())


def convolution_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, rows: Rows, *, channels: int, taps: int, gated: bool = False,
    last_tokens_only: bool = False,
) -> None:  # fmt: skip
    """A convolution with inputs of earlier chunks, and stale inputs of other requests; with a bias if it is gated."""
    tokens = rows.starts[-1] + 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(device, dtype)

    x, bias = draw(tokens, 3 * channels if gated else channels + 8), draw(channels) if gated else None
    weights, inputs = draw(channels, taps), draw(SLOTS, taps - 1, channels)
    before = numbers(inputs)
    for slot, fresh in zip(rows.slots, rows.fresh, strict=True):
        if fresh:
            inputs[slot] = float("nan")
    out = torch.full((6 if last_tokens_only else tokens, channels), float("nan"), dtype=dtype, device=device)
    held = torch.zeros(SLOTS, dtype=torch.int32, device=device)
    convolve(
        x, weights, inputs, held, rows.view(6, device), out, rows=6, mixed=max(rows.counts) > 1, bias=bias, gated=gated,
        last_tokens_only=last_tokens_only,
    )  # fmt: skip
    given = numbers(x[:, :channels] * x[:, 2 * channels :]) if gated else numbers(x[:, :channels])
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for row, (slot, fresh) in enumerate(zip(rows.slots, rows.fresh, strict=True)):
        start, end = rows.starts[row : row + 2]
        past = np.zeros_like(before[slot]) if fresh else before[slot]
        every = np.concatenate([past, given[start:end]])
        total = sum(every[tap : tap + end - start] * numbers(weights[:, tap]) for tap in range(taps))
        wanted = silu(total)
        if bias is not None:
            wanted = numbers(x[start:end, channels : 2 * channels]) * (total + numbers(bias))
        if last_tokens_only:
            assert relative(out[row : row + 1], wanted[-1:]) < limit
        else:
            assert relative(out[start:end], wanted) < limit
        assert np.array_equal(numbers(inputs[slot]), every[end - start :])
    others = [slot for slot in range(SLOTS) if slot not in rows.slots]
    assert np.array_equal(numbers(inputs[others]), before[others])
    assert bool(out[4 if last_tokens_only else rows.starts[-1] :].isnan().all())


def reference(
    sizes: DeltaSizes, mixed: np.ndarray, gates: np.ndarray, strengths: np.ndarray, rates: list[np.ndarray], norm: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Results [tokens, value_size] of one sequence, and its new state; float64."""
    keys, heads, dk, dv = sizes
    out = np.empty((len(mixed), heads, dv))
    for t, line in enumerate(mixed):
        q, k = (part.reshape(keys, dk) for part in (line[: keys * dk], line[keys * dk : 2 * keys * dk]))
        v = line[2 * keys * dk :].reshape(heads, dv)
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        for h in range(heads):
            g = h // (heads // keys)
            state[h] *= np.exp(-np.exp(rates[0][h]) * np.log1p(np.exp(strengths[t, heads + h] + rates[1][h])))
            strength = 1 / (1 + np.exp(-strengths[t, h]))
            state[h] += np.outer(k[g], strength * (v[h] - state[h].T @ k[g]))
            out[t, h] = state[h].T @ q[g] / np.sqrt(dk)
        out[t] *= norm / np.sqrt((out[t] ** 2).mean(-1, keepdims=True) + EPS)
        out[t] *= silu(gates[t].reshape(heads, dv))
    return out.reshape(len(mixed), -1), state


def long_rows(rng: np.random.Generator, block: int) -> Rows:
    """Rows with lengths around the minimum for blocks of tokens, and around the blocks' borders. block: tokens of a block."""
    few, most = int(FEWEST), 3 * block
    edges = [few - 1, few, few + 1, block - 1, block, block + 1, 2 * block, 2 * block + 1]
    counts = [*rng.choice(edges, 2).tolist(), int(rng.integers(few, most)), int(rng.integers(1, most))]
    return Rows(
        rng.permutation(counts).tolist(),
        rng.permutation([True, False, True, False]).tolist(),
        rng.permutation(SLOTS)[:4].tolist(),
    )


LOG_RATES = {"drawn": 0.0, "strong": 5.0, "weak": -30.0, "mixed": 0.0}
"""Addends of the rates' logarithms. Strong decays underflow, weak decays are 1; mixed ones are both."""


def drawn_rates(rng: np.random.Generator, decays: str, projected: torch.Tensor) -> None:
    """Change the projected rates of some tokens in place, so that a strong decay follows a decay near 1."""
    if decays == "mixed":
        chosen = torch.from_numpy(rng.random(projected.shape) < 0.3).to(projected.device)
        projected += torch.where(chosen, 60.0, -6.0).to(projected.dtype)


def recurrence_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, rows: Rows, sizes: DeltaSizes, *, last_tokens_only: bool,
    by_blocks: bool = False, decays: str = "drawn", alike: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """decays: key of LOG_RATES. alike: keys are nearly equal, strengths nearly 1. Returns the largest errors of results and
    states."""
    keys, heads, dk, dv = sizes
    tokens, size = rows.starts[-1] + 2, heads * dv

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(device, dtype)

    mixed, both, strengths = draw(tokens, 2 * keys * dk + size), draw(tokens, size + 8), draw(tokens, 2 * heads)
    strengths[0, heads] = 30.0  # softplus leaves it unchanged
    drawn_rates(rng, decays, strengths[:, heads:])
    if alike:
        mixed[:, keys * dk : 2 * keys * dk] = draw(1, keys * dk) + 0.01 * draw(tokens, keys * dk)
        strengths[:, :heads] = 6.0
    gates, norm = both[:, 8:], draw(dv)
    rates = draw(heads, dtype=torch.float32) + LOG_RATES[decays], draw(heads, dtype=torch.float32)
    matrices = draw(SLOTS, heads, dk, dv, dtype=torch.float32)
    before = numbers(matrices)
    for slot, fresh in zip(rows.slots, rows.fresh, strict=True):
        if fresh:
            matrices[slot] = float("nan")
            before[slot] = 0
    out = torch.full((6 if last_tokens_only else tokens, size), float("nan"), dtype=dtype, device=device)
    drafted, held = draw(SLOTS, 0, heads, dk + dv + 2), torch.zeros(SLOTS, dtype=torch.int32, device=device)
    recur(
        sizes, mixed, gates, strengths, rates, (norm, EPS), DraftedStates(matrices, drafted, held), rows.view(6, device), out,
        rows=6, last_tokens_only=last_tokens_only, by_blocks=by_blocks,
    )  # fmt: skip
    limit, errors = 2e-5 if dtype == torch.float32 else 1e-2, (list[float](), list[float]())
    for row, slot in enumerate(rows.slots):
        some = slice(*rows.starts[row : row + 2])
        given = [numbers(tensor[some]) for tensor in (mixed, gates, strengths)]
        wanted, state = reference(sizes, *given, [numbers(rate) for rate in rates], numbers(norm), before[slot].copy())
        found = out[row : row + 1] if last_tokens_only else out[some]
        errors[0].append(relative(found, wanted[-1:] if last_tokens_only else wanted))
        errors[1].append(relative(matrices[slot], state))
    assert max(errors[0]) < limit and max(errors[1]) < 2e-5, errors
    others = [slot for slot in range(SLOTS) if slot not in rows.slots]
    assert np.array_equal(numbers(matrices[others]), before[others])
    assert bool(out[4 if last_tokens_only else rows.starts[-1] :].isnan().all())
    return max(errors[0]), max(errors[1])


class Drafting(NamedTuple):
    """A layer's weights, and the inputs of a request's tokens, appended when drawn.

    mixed: inputs of the recurrence, as computed.
    """

    taps: np.ndarray
    rates: list[np.ndarray]
    norm: np.ndarray
    x: list[np.ndarray]
    mixed: list[np.ndarray]
    gates: list[np.ndarray]
    scores: list[np.ndarray]

    def convolved(self) -> np.ndarray:
        """The convolution of all tokens, float64."""
        count = self.taps.shape[1]
        every = np.concatenate([np.zeros((count - 1, self.taps.shape[0])), np.stack(self.x)])
        return silu(sum(every[tap : tap + len(self.x)] * self.taps[:, tap] for tap in range(count)))

    def results(self, sizes: DeltaSizes) -> tuple[np.ndarray, np.ndarray]:
        """Results of all tokens, and the state after them; float64."""
        rows = [np.stack(every) for every in (self.mixed, self.gates, self.scores)]
        return reference(sizes, *rows, self.rates, self.norm, np.zeros((sizes.value_heads, sizes.key_dim, sizes.value_dim)))


def drafting_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, sizes: DeltaSizes, *, taps: int, drafts: int, steps: int
) -> int:
    """Steps of several requests, some with drafts; the next step knows the number of correct drafts. The steps continue until
    some draft is correct. Results of all tokens and drafts must equal a recurrence over the correct tokens only. Returns the
    number of correct drafts.
    """
    keys, heads, dk, dv = sizes
    channels, size = 2 * keys * dk + heads * dv, heads * dv

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(device, dtype)

    weights, norm, rates = draw(channels, taps), draw(dv), [draw(heads, dtype=torch.float32) for _ in range(2)]
    nan = float("nan")
    matrices = torch.full((SLOTS, heads, dk, dv), nan, device=device)
    inputs = torch.full((SLOTS, taps - 1 + drafts, channels), nan, dtype=dtype, device=device)
    drafted = torch.full((SLOTS, drafts, heads, dk + dv + 2), nan, dtype=dtype, device=device)
    held = torch.full((SLOTS,), 77, dtype=torch.int32, device=device)
    slots = rng.permutation(SLOTS)[:3].tolist()
    known = [Drafting(numbers(weights), [numbers(rate) for rate in rates], numbers(norm), [], [], [], []) for _ in slots]
    correct = 0
    for step in range(4 * steps):
        if step >= steps and correct > 0:
            break
        mixed_step = step == 0 or bool(rng.random() < 0.3)
        counts = [int(rng.integers(1, 5)) if mixed_step else 1 for _ in slots]
        behind = [0 if mixed_step else int(rng.integers(0, drafts + 1)) for _ in slots]
        row_slots, lengths, contexts, emits = list[int](), list[int](), list[int](), list[int]()
        for slot, own, count, more in zip(slots, known, counts, behind, strict=True):
            row_slots += [slot] * (1 + more)
            lengths += [count] + [1] * more
            contexts += [len(own.x) + count + place for place in range(1 + more)]
            emits += [1] + [2] * more
        tokens, rows = sum(lengths), len(row_slots)
        padded = 3 * (1 + drafts)
        x, both, scores = draw(tokens, channels + 8), draw(tokens, size + 8), draw(tokens, 2 * heads)
        starts = [0, *np.cumsum(lengths).tolist()]
        ints = [row_slots + [-1] * (padded - rows), starts + [tokens] * (padded - rows), contexts + [0] * (padded - rows)]
        ints += [emits + [0] * (padded - rows)]
        of_rows = [torch.tensor(values, dtype=torch.int32, device=device) for values in ints]
        header = torch.tensor([rows, tokens, 0, 0, 0, 0, 0, 0], device=device)
        view = BatchView(header, *of_rows, of_rows[0], of_rows[0])
        mixed = torch.full((tokens, channels), nan, dtype=dtype, device=device)
        out = torch.full((tokens, size), nan, dtype=dtype, device=device)
        convolve(x, weights, inputs, held, view, mixed, rows=padded, mixed=mixed_step)
        states = DraftedStates(matrices, drafted, held)
        recur(sizes, mixed, both[:, 8:], scores, (rates[0], rates[1]), (norm, EPS), states, view, out, rows=padded)
        hold(held, view, rows=padded)
        first = 0
        for slot, own, count, more in zip(slots, known, counts, behind, strict=True):
            some, before = slice(first, first + count + more), len(own.x)
            given = [numbers(tensor[some]) for tensor in (x[:, :channels], mixed, both[:, 8:], scores)]
            kinds = own.x, own.mixed, own.gates, own.scores
            for every, values in zip(kinds, given, strict=True):
                every.extend(values)
            limits = (1e-5, 2e-5) if dtype == torch.float32 else (1e-2, 1e-2)
            assert relative(mixed[some], own.convolved()[before:]) < limits[0], (step, slot, count, more)
            wanted, _ = own.results(sizes)
            assert relative(out[some], wanted[before:]) < limits[1], (step, slot, count, more)
            for every in kinds:
                del every[before + count :]
            _, state = own.results(sizes)
            assert relative(matrices[slot], state) < 2e-5 and held[slot] == before + count
            kept = int(rng.integers(0, more + 1))
            for every, values in zip(kinds, given, strict=True):
                every.extend(values[count : count + kept])
            correct += kept
            first += count + more
    return correct


def hold_case(rng: np.random.Generator, device: str, rows: int) -> None:
    """Rows in a larger bucket, some of them drafts; other slots must stay unchanged."""
    slots, padded = 2 * rows, rows + 3
    emits = np.array([1, *rng.integers(0, 3, rows - 1), *[0] * 3])
    row_slots, contexts = rng.permutation(slots)[:padded], rng.integers(1, 1000, padded)
    held, wanted = torch.full((slots,), 77, dtype=torch.int32, device=device), [77] * slots
    for row in np.flatnonzero(emits[:rows] != 2):
        wanted[row_slots[row]] = contexts[row]
    of_rows = [torch.tensor(values, dtype=torch.int32, device=device) for values in (row_slots, contexts, emits)]
    header = torch.tensor([rows, rows, 0, 0, 0, 0, 0, 0], device=device)
    view = BatchView(header, of_rows[0], of_rows[0], *of_rows[1:], of_rows[0], of_rows[0])
    hold(held, view, rows=padded)
    assert held.tolist() == wanted


def copy_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, layers: int, matrix: tuple[int, int, int],
    taken: tuple[int, int], drafts: int, save: bool,
) -> None:  # fmt: skip
    """Copies the states of rows whose slots have a snapshot, except decode rows and the slots' drafts, and nothing else."""

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(device, dtype)

    snapshots, rows = 5, Rows([1, 3, 2, 4], [False] * 4, rng.permutation(SLOTS)[:4].tolist())
    states = draw(layers, SLOTS, *matrix), draw(layers, SLOTS, taken[0] + drafts, taken[1], dtype=dtype)
    held = torch.full((SLOTS,), 77, dtype=torch.int32, device=device)
    kept = draw(layers, snapshots, *matrix), draw(layers, snapshots, *taken, dtype=dtype)
    chosen = rng.permutation(snapshots)[:3].tolist()
    places = torch.full((SLOTS,), 2, dtype=torch.int32, device=device)  # places of slots without a row, and of the decode row
    for slot, place in zip(rows.slots[1:], [chosen[0], -1, chosen[1]], strict=True):
        places[slot] = place
    view = rows.view(6, device)
    view.counts[2] = 1  # the first row decodes
    targets, sources = (kept, states) if save else (states, kept)
    wanted = [tensor.clone() for tensor in targets]
    for slot, place in ((rows.slots[1], chosen[0]), (rows.slots[3], chosen[1])):
        to, of = (place, slot) if save else (slot, place)
        for target, source in zip(wanted, sources, strict=True):
            count = min(target.shape[2], source.shape[2])
            target[:, to, :count] = source[:, of, :count]
    unchanged = [tensor.clone() for tensor in sources]
    copy_states(states, kept, held, places, view, rows=6, save=save)
    known = [3 if slot in (rows.slots[1], rows.slots[3]) and not save else 77 for slot in range(SLOTS)]
    assert held.tolist() == known, "tokens of the snapshots"
    for found, expected in zip((*targets, *sources), (*wanted, *unchanged), strict=True):
        assert torch.equal(found, expected)


def gate_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, rows: Rows, *, width: int, last_tokens_only: bool
) -> None:  # fmt: skip
    tokens = rows.starts[-1]
    gates = torch.from_numpy(rng.normal(size=(tokens, width))).to(device, dtype)
    x = torch.from_numpy(rng.normal(size=(4 if last_tokens_only else tokens, width))).to(device, dtype)
    own = gates[[end - 1 for end in rows.starts[1:]]] if last_tokens_only else gates
    wanted = numbers(x) / (1 + np.exp(-numbers(own)))
    view = rows.view(4, device)
    if last_tokens_only:
        view.counts[1] = 4  # as last_tokens leaves it
    gate_output(x, gates, view.query_starts if last_tokens_only else None, view.counts)
    assert relative(x, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)
