"""The bugs that `make test-rdma T=seeded-bugs` looks for fit the source, and are Python."""

import pytest
from rdma.seeded_bugs import RDMA_BUGS
from support.seeded_bugs import Bug, patched_source


@pytest.mark.parametrize("bug", [bug for bug, _ in RDMA_BUGS], ids=lambda bug: bug.what)
def test_patches_fit(bug: Bug) -> None:
    compile(patched_source(bug), bug.module, "exec")
