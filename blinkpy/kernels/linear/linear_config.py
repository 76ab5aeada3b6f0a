"""The parameters of a linear layer's kernel. They decide the order of the sums, which is therefore fixed per
bucket, and so is every result.
"""

from dataclasses import dataclass

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import check_power_of_two

MOST = {"block_m": 256, "block_n": 512, "block_k": 8192, "split_k": 64, "warps": 32, "stages": 16, "tiles": 1 << 20}
"""The largest value of each number of a configuration."""


@dataclass(frozen=True)
class LinearConfig:
    """The configuration of one linear layer. Fields that a variant does not use keep their defaults.

    Raises ConfigError for values that no variant supports. `blinkpy.kernels.linear.linear.check_config`
    checks them for a variant and a shape.
    """

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
    """Release the dependent launch at the start, not after the products. This helps if one program fills an SM;
    otherwise the programs of the next layer crowd the few SMs that become free first.
    """

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"linear configuration: {name} {value!r} must be an integer from 1 to {most}")
        for name, least in (("block_m", 16), ("block_k", 16), ("warps", 1)):
            check_power_of_two(f"linear configuration: {name}", getattr(self, name), least)
