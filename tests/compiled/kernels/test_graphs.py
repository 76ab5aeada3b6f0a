"""Where the parts of a scheduler's turn are put beside a step graph, on synthetic graphs."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
pytest.importorskip("cuda.bindings")

from blinkpy.device.cuda import cuda_graphs
from blinkpy.engine import loop_graph


def test_a_chain_comes_in_order_whatever_order_the_driver_lists_it_in(rng: np.random.Generator) -> None:
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
        [(0, 1), (2, 3), (3, 2)],  # a circle beside a chain
        [(0, 1), (1, 2), (2, 3), (3, 0)],  # a circle
        [(0, 1), (1, 2), (2, 3), (0, 3)],  # a way around
    ],
)
def test_what_is_not_one_chain_is_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="is not one chain"):
        cuda_graphs.in_order([0, 1, 2, 3], edges)


def test_overlap_begins_before_the_output_however_many_kernels_that_has(rng: np.random.Generator) -> None:
    layers = int(rng.integers(loop_graph.OVERLAP_LEAD_KERNELS + 1, 400))
    for output in (2, 5, 9):
        after, first = loop_graph.overlap_anchors(list(range(layers + output)), layers)
        assert (after, first) == ([layers - loop_graph.OVERLAP_LEAD_KERNELS - 1], layers)
    assert loop_graph.overlap_anchors(list(range(9)), 7) == ([], 7)  # shorter than `overlap` needs: from the start on


def test_overlap_runs_beside_the_last_kernels_of_a_group_of_layers_that_has_no_output(rng: np.random.Generator) -> None:
    lead, kernels = loop_graph.OVERLAP_LEAD_IN_GROUP, int(rng.integers(2, 100))
    assert loop_graph.overlap_anchors(list(range(lead + kernels)), lead + kernels, ends=False) == ([kernels - 1], None)
    assert loop_graph.overlap_anchors(list(range(lead)), lead, ends=False) == ([], None)


@pytest.mark.parametrize("layers", [-1, 0, 20, 21])
def test_a_capture_that_says_nothing_useful_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="of 20 nodes can't have"):
        loop_graph.overlap_anchors(list(range(20)), layers)
