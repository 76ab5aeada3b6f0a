"""The bugs that `make test-rdma T=seeded-bugs` looks for fit the source, and are Python."""

from __future__ import annotations

import pytest
from rdma.seeded_bugs import RDMA_BUGS, patched
from seeded_bugs import Bug


@pytest.mark.parametrize("bug", [bug for bug, _ in RDMA_BUGS], ids=lambda bug: bug.what)
def test_patches_fit(bug: Bug) -> None:
    compile(patched(bug), bug.module, "exec")
