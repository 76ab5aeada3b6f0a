"""Cases of state-space layers: the recurrence and the norm of groups, against NumPy in float64."""

import numpy as np
import torch
from support.models.kernel_cases.delta_cases import EPS, LOG_RATES, SLOTS, Rows, drawn_rates, numbers, relative, silu

from blinkpy.kernels.delta.recurrence import DraftedStates
from blinkpy.kernels.delta.state_space import SpaceRates, SpaceSizes, norm_groups, scan


def reference(
    sizes: SpaceSizes, mixed: np.ndarray, gates: np.ndarray, steps: np.ndarray, rates: list[np.ndarray], state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gated results [tokens, value_size] of one sequence, and its new state; float64."""
    heads, groups, dk, dv = sizes
    size, out = heads * dv, np.empty((len(mixed), heads, dv))
    for t, line in enumerate(mixed):
        v = line[:size].reshape(heads, dv)
        k, q = line[size:].reshape(2, groups, dk)
        step = np.log1p(np.exp(steps[t] + rates[1]))
        for h in range(heads):
            g = h // (heads // groups)
            state[h] = np.exp(-np.exp(rates[0][h]) * step[h]) * state[h] + np.outer(k[g], step[h] * v[h])
            out[t, h] = state[h].T @ q[g] + rates[2][h] * v[h]
    return out.reshape(len(mixed), -1) * silu(gates), state


def scan_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, rows: Rows, sizes: SpaceSizes, *, last_tokens_only: bool,
    by_blocks: bool = False, decays: str = "drawn",
) -> tuple[float, float]:  # fmt: skip
    """A scan with states of earlier chunks, and stale states of other requests. Arguments and result as in recurrence_case."""
    heads, groups, dk, dv = sizes
    tokens, size = rows.starts[-1] + 2, heads * dv

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(device, dtype)

    mixed, both = draw(tokens, size + 2 * groups * dk), draw(tokens, 8 + size + heads)
    gates, steps = both[:, 8 : 8 + size], both[:, 8 + size :]
    steps[0, 0] = 30.0  # softplus leaves it unchanged
    drawn_rates(rng, decays, steps)
    log_rates, biases, skips = (draw(heads, dtype=torch.float32) for _ in range(3))
    rates = SpaceRates(log_rates + LOG_RATES[decays], biases, skips)
    matrices = draw(SLOTS, heads, dk, dv, dtype=torch.float32)
    before = numbers(matrices)
    for slot, fresh in zip(rows.slots, rows.fresh, strict=True):
        if fresh:
            matrices[slot] = float("nan")
            before[slot] = 0
    out = torch.full((6 if last_tokens_only else tokens, size), float("nan"), dtype=dtype, device=device)
    drafted, held = draw(SLOTS, 0, heads, dk + dv + 1), torch.zeros(SLOTS, dtype=torch.int32, device=device)
    scan(
        sizes, mixed, gates, steps, rates, DraftedStates(matrices, drafted, held), rows.view(6, device), out,
        rows=6, last_tokens_only=last_tokens_only, by_blocks=by_blocks,
    )  # fmt: skip
    limit, errors = 2e-5 if dtype == torch.float32 else 1e-2, (list[float](), list[float]())
    for row, slot in enumerate(rows.slots):
        some = slice(*rows.starts[row : row + 2])
        given = [numbers(tensor[some]) for tensor in (mixed, gates, steps)]
        wanted, state = reference(sizes, *given, [numbers(rate) for rate in rates], before[slot].copy())
        found = out[row : row + 1] if last_tokens_only else out[some]
        errors[0].append(relative(found, wanted[-1:] if last_tokens_only else wanted))
        errors[1].append(relative(matrices[slot], state))
    assert max(errors[0]) < limit and max(errors[1]) < 2e-5, errors
    others = [slot for slot in range(SLOTS) if slot not in rows.slots]
    assert np.array_equal(numbers(matrices[others]), before[others])
    assert bool(out[4 if last_tokens_only else rows.starts[-1] :].isnan().all())
    return max(errors[0]), max(errors[1])


def group_norm_case(rng: np.random.Generator, device: str, dtype: torch.dtype, *, groups: int, size: int) -> None:
    """The norm of the first rows of a larger bucket; other rows must stay unchanged."""
    x, weight = (torch.from_numpy(rng.normal(size=shape)).to(device, dtype) for shape in ((5, groups * size), (groups * size,)))
    before, counts = numbers(x), torch.zeros(8, dtype=torch.int64, device=device)
    counts[1] = 3
    norm_groups(x, weight, EPS, counts, groups=groups)
    grouped = before[:3].reshape(3, groups, size)
    wanted = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + EPS)).reshape(3, -1) * numbers(weight)
    assert relative(x[:3], wanted) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert np.array_equal(numbers(x[3:]), before[3:])
