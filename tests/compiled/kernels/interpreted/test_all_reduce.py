"""Sums over ranks in Triton's interpreter: all ranks in one memory, phase by phase, because its programs can't wait."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from blinkpy.kernels import all_reduce as module
from blinkpy.kernels.all_reduce import BLOCK, PROGRAMS, Peers, all_reduce, connect_peers, gather_logits

NAN = float("nan")


def connected(ranks: int, tokens: int, hidden: int, dtype: torch.dtype, rows: int = 1, vocab: int = 64) -> list[Peers]:
    """All memory that kernels must write before reading holds NaN."""
    borders = [vocab * rank // ranks for rank in range(ranks + 1)]
    head = [range(a, b) for a, b in pairwise(borders)]
    peers = connect_peers([torch.device("cpu")] * ranks, dtype, tokens, hidden, rows, head)
    for tensor in peers[0].memory:
        if tensor.is_floating_point():
            tensor.fill_(NAN)
    return peers


def header(tokens: int) -> torch.Tensor:
    return torch.tensor([0, tokens, 0, 0, 0, 0, 0, 0])


def summed(addends: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(addends[0], dtype=torch.float32)
    for addend in addends:
        total = total + addend.float()
    return total.to(addends[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_the_order_of_ranks(
    ranks: int, dtype: torch.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one shot and in two, with whole and partly filled batches, into the residual stream or next to it."""
    hidden, most = int(rng.choice([rng.integers(100, 700), BLOCK - 1, BLOCK, BLOCK + 1])), 12
    monkeypatch.setattr(module, "ONE_SHOT_BYTES", 5 * hidden * dtype.itemsize)
    peers = connected(ranks, most, hidden, dtype)
    shapes = [(rows, int(rng.integers(1, rows + 1)), bool(rng.integers(2))) for rows in (1, most, 5, most, 2)]
    for rows, tokens, add in [*shapes, (most, 0, True)]:
        addends = [torch.randn(rows, hidden).to(dtype) for _ in range(ranks)]
        before = torch.randn(rows, hidden).to(dtype)
        outs = [before.clone() for _ in range(ranks)]
        for own, addend in zip(peers, addends, strict=True):
            own.addend[:rows] = addend
        for phases in (1, 2, 4):
            for rank in rng.permutation(ranks).tolist():
                all_reduce(outs[rank], header(tokens), peers[rank], add=add, phases=phases)
        total = summed([addend[:tokens] for addend in addends])
        expected = torch.cat([(before[:tokens].float() + total.float()).to(dtype) if add else total, before[tokens:]])
        assert all(torch.equal(out, expected) for out in outs)
    assert all(own.fault.tolist() == [0, 0] and own.epochs.tolist() == [len(shapes)] * PROGRAMS for own in peers)


def test_logits_of_all_ranks(rng: np.random.Generator) -> None:
    rows, vocab = 7, 3 * int(rng.choice([BLOCK - 1, BLOCK, BLOCK + 1]))
    peers = connected(3, 1, 8, torch.float32, rows, vocab)
    for tokens in (rows, int(rng.integers(1, rows)), 100):
        parts = [torch.randn(own.part.shape) for own in peers]
        for own, part in zip(peers, parts, strict=True):
            own.part.copy_(part)
        for phases in (1, 2):
            found = [gather_logits(rows, header(tokens), peers[rank], phases=phases) for rank in rng.permutation(3).tolist()]
        assert all(torch.equal(whole[:tokens], torch.cat(parts, dim=1)[:tokens]) for whole in found)
    assert all(own.fault.tolist() == [0, 0] for own in peers)


def test_a_late_peer_is_a_fault() -> None:
    """After the fault no program waits: only the first of 64 layers may be slow."""
    peers = connected(2, 1, 100, torch.float32)
    out = torch.zeros(1, 100)
    peers[0].addend.fill_(1)
    all_reduce(out, header(1), peers[0], spins=3, phases=1)
    all_reduce(out, header(1), peers[0], spins=3, phases=2)
    assert peers[0].fault.tolist() == [1, 1]
    assert peers[1].fault.tolist() == [0, 0]
    all_reduce(out, header(1), peers[0], spins=1 << 30, phases=2)


def test_a_tensor_that_is_too_large() -> None:
    peers = connected(2, 3, 100, torch.float32)
    with pytest.raises(ValueError, match=r"addend: shape \[3, 100\], expected \[at least 4, 100\]"):
        all_reduce(torch.ones(4, 100), header(4), peers[0])
