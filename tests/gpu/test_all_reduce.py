"""Sums over ranks between two GPUs of one process: exact, equal on both, in graphs, and a fault if a peer is late.

Supports claim ranks/results.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.gpu.two_gpus import needs_two_gpus, open_peer_access

from blinkpy.kernels.all_reduce import Peers, all_reduce, connect_peers, gather_logits

pytestmark = needs_two_gpus
HIDDEN, TOKENS, ROWS, VOCAB = 4096, 512, 64, 32_000
Launch = Callable[[int], object]


@pytest.fixture
def peers(request: pytest.FixtureRequest) -> list[Peers]:
    open_peer_access(2)
    devices = [torch.device("cuda", rank) for rank in range(2)]
    head = [range(VOCAB // 2), range(VOCAB // 2, VOCAB)]
    made = connect_peers(devices, getattr(request, "param", torch.bfloat16), TOKENS, HIDDEN, ROWS, head)
    synchronise()
    return made


def synchronise() -> None:
    for rank in range(2):
        torch.cuda.synchronize(rank)


def captured(launch: Launch, times: int, counts: list[torch.Tensor]) -> list[Callable[[], None]]:
    """A function for each GPU that replays a graph of the launches. A batch without tokens compiles them first, so that no kernel
    waits while the other GPU's is compiled.
    """
    streams, replays = [torch.cuda.Stream(rank) for rank in range(2)], list[Callable[[], None]]()
    kept = [own.clone() for own in counts]
    for own in counts:
        own.zero_()
    synchronise()
    for rank, stream in enumerate(streams):
        with torch.cuda.device(rank), torch.cuda.stream(stream):
            launch(rank)
    synchronise()
    for own, batch in zip(counts, kept, strict=True):
        own.copy_(batch)
    synchronise()
    for rank, stream in enumerate(streams):
        with torch.cuda.device(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(times):
                    launch(rank)

            def replay(rank: int = rank, stream: torch.cuda.Stream = stream, graph: torch.cuda.CUDAGraph = graph) -> None:
                with torch.cuda.device(rank), torch.cuda.stream(stream):
                    graph.replay()

            replays.append(replay)
    return replays


def header(tokens: int) -> list[torch.Tensor]:
    return [torch.tensor([0, tokens, 0, 0, 0, 0, 0, 0], device=f"cuda:{rank}") for rank in range(2)]


@pytest.mark.parametrize("peers", [torch.bfloat16, torch.float32], indirect=True)
def test_exact_and_equal_in_graphs(peers: list[Peers], rng: np.random.Generator) -> None:
    dtype = peers[0].addend.dtype
    for rows in (1, int(rng.integers(2, 30)), TOKENS):
        tokens = int(rng.integers(1, rows + 1))
        counts = header(tokens)
        xs = [torch.zeros(rows, HIDDEN, device=f"cuda:{rank}", dtype=dtype) for rank in range(2)]
        outs = [torch.zeros_like(x) for x in xs]

        def launch(rank: int, xs=xs, outs=outs, counts=counts, rows=rows) -> None:  # type: ignore[no-untyped-def]
            peers[rank].addend[:rows].copy_(xs[rank])
            all_reduce(outs[rank], counts[rank], peers[rank])

        replays = captured(launch, 16, counts)
        for _ in range(30):
            for x in xs:
                x.normal_()
            total = (xs[0].float().cpu() + xs[1].float().cpu()).to(dtype)
            synchronise()
            for replay in replays:
                replay()
            synchronise()
            assert all(torch.equal(out[:tokens].cpu(), total[:tokens]) for out in outs)
    assert all(own.fault.tolist() == [0, 0] for own in peers)


def test_logits_of_both(peers: list[Peers]) -> None:
    counts, found = header(ROWS - 3), [torch.zeros(0), torch.zeros(0)]
    out = [torch.zeros(1, HIDDEN, device=f"cuda:{rank}", dtype=torch.bfloat16) for rank in range(2)]

    def launch(rank: int) -> None:
        all_reduce(out[rank], counts[rank], peers[rank])
        found[rank] = gather_logits(ROWS, counts[rank], peers[rank])

    replays = captured(launch, 1, counts)
    for _ in range(20):
        for own in peers:
            own.part.normal_()
        synchronise()
        for replay in replays:
            replay()
        synchronise()
        whole = torch.cat([own.part.cpu() for own in peers], dim=1)[: ROWS - 3]
        assert all(torch.equal(some[: ROWS - 3].cpu(), whole) for some in found)


def test_a_late_peer_is_a_fault(peers: list[Peers]) -> None:
    counts = header(1)[0]
    with torch.cuda.device(0):
        all_reduce(torch.zeros(1, HIDDEN, device="cuda:0", dtype=torch.bfloat16), counts, peers[0], spins=1000)
        torch.cuda.synchronize(0)
    assert peers[0].fault.tolist() == [1, 1]
