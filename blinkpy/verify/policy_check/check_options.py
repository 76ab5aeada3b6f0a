"""Options of `blinkpy check`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import (
    CLASS_SIZES,
    CUT_STEP_TOKENS,
    MOST_GROUPS,
    STEP_SIZES,
    SUSPEND_STEPS,
    YIELD_STEPS,
    ConfigError,
    check_class_sizes,
    check_step_sizes,
    check_value,
    option,
)

NOT_OF_FLEETS = ("workload", "storm", "allow_starvation", "timeout_s", "plot")


@dataclass(frozen=True)
class CheckOptions:
    """What is checked, and the machine that is simulated. The defaults are about Llama-3-8B on one H200."""

    policy: str = option("", "FILE.py:FUNCTION, or a shipped policy (with --fleet: default short-prompts)")
    fleet: int = option(0, "engines whose placement is checked, in place of the policy (0: none)", low=0, high=64)
    placement: str = option("", "with --fleet: FILE.py with a function choose, to compare with the shipped ones")
    workload: str = option("azure", "'azure' (conversation lengths that ship with blinkpy), or a CSV file (docs/policies.md)")
    requests: int = option(2000, "requests of the workload, from its start", low=10, high=100_000)
    rate: float = option(16.0, "mean arrivals at each engine, requests/s (0: at the workload's own times)", low=0, high=1e6)
    max_num_seqs: int = option(64, "sequences in one step", low=1, high=4096)
    max_num_batched_tokens: int = option(2048, "tokens in one step", low=1, high=1 << 20)
    mixed_step_tokens: int = option(0, "as the server's option of this name", low=0, high=1 << 20)
    burst_step_tokens: int = option(0, "as the server's option of this name", low=0, high=1 << 20)
    burst_tokens: int = option(0, "as the server's option of this name", low=0, high=1 << 24)
    yield_steps: int = option(YIELD_STEPS, "as the server's option of this name", low=0, high=1 << 20)
    best_effort_step_tokens: int = option(0, "as the server's option of this name", low=0, high=1 << 20)
    sensitive_step_tokens: int = option(0, "as the server's option of this name", low=0, high=1 << 20)
    best_effort_pages: float = option(1.0, "as the server's option of this name", low=0.001, high=1.0)
    step_groups: int = option(1, "as the server's option of this name", low=1, high=MOST_GROUPS)
    cut_step_tokens: int = option(CUT_STEP_TOKENS, "as the server's option of this name", low=0, high=1 << 20)
    suspend_steps: int = option(SUSPEND_STEPS, "as the server's option of this name", low=0, high=1 << 20)
    border_us: float = option(18.0, "time of the turn between two groups of a step, us", low=0, high=1e6)
    page_size: int = option(16, "tokens of a page; a power of two", low=4, high=256)
    num_pages: int = option(5120, "pages of the KV cache", low=16, high=1 << 20)
    step_us: float = option(4500.0, "time of an empty step, us", low=0, high=1e7)
    row_us: float = option(22.0, "time for each decoding sequence of a step, us", low=0, high=1e6)
    token_us: float = option(27.0, "time for each prefill token of a step, us", low=0, high=1e6)
    storm: int = option(200_000, "turns in a simulated storm of faults (0: none)", low=0, high=10**10)
    allow_starvation: bool = option(False, "report requests that may wait for ever, without failing")
    timeout_s: int = option(300, "seconds for the simulation of one policy", low=1, high=86_400)
    seed: int = option(0, "seed of the synthetic requests", low=0, high=2**31 - 1)
    plot: str = option("", "plot of the waiting times (.png, .svg or .pdf); needs matplotlib")
    json: str = option("", "results as JSON")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, not {self.page_size}")
        check_step_sizes(*(getattr(self, name) for name in STEP_SIZES))
        check_class_sizes(*(getattr(self, name) for name in CLASS_SIZES))
        self._check_fleet()
        if self.step_us + self.row_us + self.token_us <= 0:
            raise ConfigError("a step must take time: one of step_us, row_us and token_us has to be above 0")

    def _check_fleet(self) -> None:
        """Raise ConfigError for options that mean nothing with a fleet, or without one."""
        if not self.fleet and not self.policy:
            raise ConfigError("check needs a POLICY, or --fleet N for placements")
        if not self.fleet and self.placement:
            raise ConfigError("placement needs fleet")
        if self.fleet == 1:
            raise ConfigError("a fleet has 2 engines at least")
        if self.fleet and self.rate == 0:
            raise ConfigError("rate must be above 0 with fleet: its workloads have no times of their own")
        for item in fields(self):
            if self.fleet and item.name in NOT_OF_FLEETS and getattr(self, item.name) != item.default:
                raise ConfigError(f"{item.name} can't be used with fleet")
