"""Options of `blinkpy check`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import BatchOptions, ConfigError, check_class_sizes, check_step_sizes, check_value, option

NOT_OF_FLEETS = ("workload", "storm", "allow_starvation", "timeout_s", "plot")


@dataclass(frozen=True)
class CheckOptions(BatchOptions):
    """The policy or placement to check, and the machine to simulate. Defaults model Llama-3-8B on one H200."""

    policy: str = option("", "FILE.py:FUNCTION, or the name of a shipped policy (with --fleet: default short-prompts)")
    fleet: int = option(
        0, "number of engines; checks how requests are placed on them, instead of a policy (0: check the policy)", low=0, high=64
    )
    placement: str = option("", "with --fleet: FILE.py with a function choose(), to compare with the shipped rules")
    workload: str = option("azure", "'azure' for the bundled conversation lengths, or a CSV file (docs/policies.md)")
    requests: int = option(2000, "number of requests, taken from the start of the workload", low=10, high=100_000)
    rate: float = option(16.0, "mean arrival rate per engine, in requests/s (0: arrival times of the workload)", low=0, high=1e6)
    max_num_seqs: int = option(64, "maximum requests per step", low=1, high=4096)
    max_num_batched_tokens: int = option(2048, "maximum tokens per step", low=1, high=1 << 20)
    mixed_step_tokens: int = option(
        0,
        "maximum tokens of a step that has both decodes and prompt chunks, outside a burst (0: no such limit)",
        low=0,
        high=1 << 20,
    )
    burst_step_tokens: int = option(
        0, "maximum tokens of a step with decodes during a burst of long prompts (0: no such limit)", low=0, high=1 << 20
    )
    border_us: float = option(18.0, "time of the scheduler between two layer groups of a step, in us", low=0, high=1e6)
    page_size: int = option(16, "tokens per page of the KV cache; a power of two", low=4, high=256)
    num_pages: int = option(5120, "pages of the KV cache", low=16, high=1 << 20)
    step_us: float = option(4500.0, "time of an empty step, in us", low=0, high=1e7)
    row_us: float = option(22.0, "additional time of a step per decoding request, in us", low=0, high=1e6)
    token_us: float = option(27.0, "additional time of a step per prompt token, in us", low=0, high=1e6)
    storm: int = option(200_000, "scheduler turns to simulate under injected faults (0: none)", low=0, high=10**10)
    allow_starvation: bool = option(False, "report starvation of requests as a warning instead of an error")
    timeout_s: int = option(300, "time limit for the simulation of one policy, in seconds", low=1, high=86_400)
    seed: int = option(0, "random seed of the synthetic requests", low=0, high=2**31 - 1)
    plot: str = option("", "file for a plot of the waiting times (.png, .svg or .pdf); needs matplotlib")
    json: str = option("", "file for the results as JSON")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, not {self.page_size}")
        check_step_sizes(self)
        check_class_sizes(self)
        self._check_fleet()
        if self.step_us + self.row_us + self.token_us <= 0:
            raise ConfigError("one of step_us, row_us and token_us must be above 0, so that a step takes time")

    def _check_fleet(self) -> None:
        """Raise ConfigError for options that have no effect with, or without, --fleet."""
        if not self.fleet and not self.policy:
            raise ConfigError("give a POLICY to check, or --fleet N to check placements")
        if not self.fleet and self.placement:
            raise ConfigError("--placement needs --fleet")
        if self.fleet == 1:
            raise ConfigError("--fleet must be at least 2")
        if self.fleet and self.rate == 0:
            raise ConfigError("--rate must be above 0 with --fleet, whose workloads have no arrival times")
        for item in fields(self):
            if self.fleet and item.name in NOT_OF_FLEETS and getattr(self, item.name) != item.default:
                raise ConfigError(f"{item.name} can't be used with --fleet")
