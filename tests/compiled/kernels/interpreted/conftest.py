"""These tests run kernels in Triton's interpreter, in a process of their own: see ../test_triton_interpreted.py."""

import os
import zlib

import pytest
import torch

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from support.models import triton_interpreter

    triton_interpreter.install()
else:
    collect_ignore_glob.append("*")  # the wrapper test runs them


@pytest.fixture
def either_dtype(request: pytest.FixtureRequest, seed: int) -> torch.dtype:
    """One of two: half of the tests have each, and with the next seed the other one."""
    chosen = (torch.float32, torch.bfloat16)[(zlib.crc32(request.node.name.encode()) + seed) % 2]
    print(chosen)
    return chosen
