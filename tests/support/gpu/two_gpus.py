"""Shared code of tests with two GPUs of one machine."""

import pytest
import torch

LACKING = "needs two NVIDIA GPUs with peer access: nothing was tested"


def have_two() -> bool:
    return torch.cuda.device_count() >= 2 and torch.cuda.can_device_access_peer(0, 1)


needs_two_gpus = pytest.mark.skipif(not have_two(), reason=LACKING)


def open_peer_access(ranks: int) -> None:
    """Let the kernels of each GPU access the memory of all GPUs. torch enables this with the first copy."""
    for one in range(ranks):
        for other in range(ranks):
            if one != other:
                torch.zeros(1, device=f"cuda:{one}").copy_(torch.zeros(1, device=f"cuda:{other}"))
