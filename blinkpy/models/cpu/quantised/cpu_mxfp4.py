"""MXFP4 matrices as torch can multiply them (OCP Microscaling Formats, version 1.0: elements E2M1, scales E8M0)."""

import torch

from blinkpy.models.cpu.step_progress import StepProgress

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
VALUES = torch.tensor([(_E2M1[byte % 16], _E2M1[byte // 16]) for byte in range(256)])  # float32 [256, 2], of each byte
FACTORS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)  # float32 [256], of each scale
WORK = 256  # multiply-adds that take as long as to unpack one weight, at the most


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, progress: StepProgress) -> torch.Tensor:
    """MXFP4 weights as [rows, columns] of a dtype, exact within its range. blocks: uint8 [rows, columns / 2],
    the first weight of a byte in its lower half. scales: uint8 [rows, columns / 32]. progress: advances during
    the work.
    """
    (rows, half), groups = blocks.shape, scales.shape[1]
    out = torch.empty(rows, groups, 2 * half // groups, dtype=dtype)
    for part in progress.pieces(rows, WORK * 2 * half):
        values = VALUES[blocks[part].int()].view(-1, *out.shape[1:])
        torch.mul(values, FACTORS[scales[part].int()][..., None], out=out[part])
    return out.view(rows, 2 * half)
