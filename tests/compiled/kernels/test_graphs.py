"""The position of a scheduler turn's parts in a step graph, with synthetic graphs."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
pytest.importorskip("cuda.bindings")

from cuda.bindings import runtime

from blinkpy.device.cuda import cuda_graphs
from blinkpy.engine import loop_graph
from blinkpy.models.gpu.step_shapes import blocks_of_group, mlp_follows, most_groups


def test_a_chain_is_ordered_for_any_order_of_the_driver(rng: np.random.Generator) -> None:
    chain = rng.permutation(1000)[: int(rng.integers(1, 60))].tolist()
    edges = list(itertools.pairwise(chain))
    for _ in range(5):
        rng.shuffle(edges)
        assert cuda_graphs.in_order(rng.permutation(chain).tolist(), [tuple(edge) for edge in edges]) == chain


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (1, 2)],  # 3 alone
        [(0, 1), (1, 2), (1, 3)],  # a fork
        [(0, 2), (1, 2), (2, 3)],  # a join
        [(0, 1), (2, 3), (3, 2)],  # a cycle next to a chain
        [(0, 1), (1, 2), (2, 3), (3, 0)],  # a circle
        [(0, 1), (1, 2), (2, 3), (0, 3)],  # a detour
    ],
)
def test_a_graph_that_is_no_chain_is_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="is not a single chain"):
        cuda_graphs.in_order([0, 1, 2, 3], edges)


def test_overlap_begins_before_the_output_however_many_kernels_that_has(rng: np.random.Generator) -> None:
    layers = int(rng.integers(loop_graph.OVERLAP_LEAD_KERNELS + 1, 400))
    for output in (2, 5, 9):
        after, first = loop_graph.overlap_anchors(list(range(layers + output)), layers)
        assert (after, first) == ([layers - loop_graph.OVERLAP_LEAD_KERNELS - 1], layers)
    assert loop_graph.overlap_anchors(list(range(9)), 7) == ([], 7)  # shorter than `overlap` needs, so from the start on


def test_overlap_begins_before_or_behind_the_last_kernel_of_a_group_that_has_no_output(rng: np.random.Generator) -> None:
    kernels = int(rng.integers(2, 100))
    assert loop_graph.overlap_anchors(list(range(kernels)), kernels, ends=False) == ([kernels - 2], None)
    assert loop_graph.overlap_anchors(list(range(kernels)), kernels, ends=False, late=True) == ([kernels - 1], None)
    assert loop_graph.overlap_anchors([0], 1, ends=False) == ([], None)


@pytest.mark.parametrize("second", [cuda_graphs.FULL, cuda_graphs.PROGRAMMATIC])
def test_a_kernel_begins_behind_the_end_of_another_by_any_full_edge(monkeypatch: pytest.MonkeyPatch, second: object) -> None:
    kinds = cuda_graphs.FULL, second, cuda_graphs.PROGRAMMATIC
    edges = [1, 2, 3], [5, 5, 6], [SimpleNamespace(type=kind) for kind in kinds]
    succeeded = runtime.cudaError_t.cudaSuccess
    monkeypatch.setattr(runtime, "cudaGraphGetEdges", lambda graph, count: (succeeded, *edges, 3))
    assert cuda_graphs.begins_behind(object(), 5) == (second == cuda_graphs.FULL)
    assert not cuda_graphs.begins_behind(object(), 6) and cuda_graphs.begins_behind(object(), 7)


def test_the_longest_wait_is_located(rng: np.random.Generator) -> None:
    layers = int(rng.integers(2, 60))
    groups = int(rng.integers(2, most_groups(layers) + 1))
    firsts = [blocks_of_group(layers, groups, group)[0] for group in range(1, groups)]  # even: attention
    assert [mlp_follows(layers, groups, group) for group in range(groups - 1)] == [first % 2 == 1 for first in firsts]


@pytest.mark.parametrize("layers", range(1, 40))
def test_no_group_is_empty_if_layers_lack_an_mlp(layers: int) -> None:
    for groups in range(1, most_groups(layers, bare=True) + 1):
        blocks = [blocks_of_group(layers, groups, group) for group in range(groups)]
        assert all(any(block % 2 == 0 for block in some) for some in blocks), "a group without attention has an empty graph"


@pytest.mark.parametrize("layers", [-1, 0, 20, 21])
def test_an_unusable_capture_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="of 20 nodes can't contain"):
        loop_graph.overlap_anchors(list(range(20)), layers)
