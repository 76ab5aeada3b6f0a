"""The kernels around a draft layer, in the interpreter. test_block_edges.py tests their blocks."""

import numpy as np
from support.models.kernel_cases.draft_cases import rows_case


def test_rows_that_get_drafts(rng: np.random.Generator) -> None:
    for _ in range(4):
        rows_case(rng, "cpu")
