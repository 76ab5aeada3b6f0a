"""The parameters of a linear layer's kernel. They decide the order of the sums: fixed per bucket, and with them every result."""

from dataclasses import dataclass

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import check_power_of_two


@dataclass(frozen=True)
class LinearConfig:
    """How one linear layer is computed. What a variant does not use keeps its default."""

    variant: str = "triton"  # name of a `LinearVariant`
    block_m: int = 16
    block_n: int = 32
    block_k: int = 256
    split_k: int = 1
    warps: int = 4
    stages: int = 4
    weights_first: bool = False  # weights as the first operand of the matrix unit
    elementwise: bool = False  # gemv: multiply-adds of single elements, and one reduction at the end
    tiles: int = 1  # fp8_gemv: tiles that a program computes, one after another
    early_trigger: bool = False
    """Release the dependent launch at the start, not after the products. Good where one program fills an SM; otherwise the
    programs of the next layer crowd on the few SMs that get free first."""


def check_sizes(config: LinearConfig, **smallest: int) -> None:
    """Raise ConfigError unless blocks and warps are powers of two, and counts positive. smallest: value of a field, where it is
    not 16 (warps: 1); 0 for a field that is not checked."""
    for name, least in {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 1, **smallest}.items():
        if least:
            check_power_of_two(f"linear configuration: {name}", getattr(config, name), least)
    if min(config.split_k, config.stages, config.tiles) < 1:
        raise ConfigError(f"linear configuration: split_k, stages or tiles out of range in {config}")
