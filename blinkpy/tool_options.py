"""Options of the commands that are not servers. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from blinkpy.config import (
    MOST_RANKS,
    BatchOptions,
    ConfigError,
    check_class_sizes,
    check_engine_name,
    check_step_sizes,
    check_value,
    option,
)


@dataclass(frozen=True)
class CheckModelOptions:
    """The model, and the options that it would be served with. Only config.json, tokenizer and weight headers are read."""

    model: str = option("demo", "folder, or Hugging Face hub id; only small files are downloaded")
    dtype: str = option("auto", "same as for blinkpy serve", choices=("auto", "float32", "bfloat16"))
    quantization: str = option("auto", "same as for blinkpy serve", choices=("auto", "fp8"))
    speculative_model: str = option("", "same as for blinkpy serve")
    max_model_len: int = option(0, "same as for blinkpy serve", low=0, high=1 << 22)
    gpu_memory_utilization: float = option(0.9, "same as for blinkpy serve", low=0.05, high=0.98)
    slots: int = option(0, "same as for blinkpy serve", low=0, high=65535)
    window_cache: str = option("full", "same as for blinkpy serve", choices=("full", "ring"))
    kv_cache_dtype: str = option("auto", "same as for blinkpy serve", choices=("auto", "fp8_e4m3"))
    tensor_parallel_size: int = option(1, "same as for blinkpy serve", low=1, high=MOST_RANKS)
    gpu_gib: float = option(0.0, "memory of a hypothetical additional GPU, in GiB (0: no GPU)", low=0, high=4096)
    json: bool = option(False, "print the result as JSON")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))


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
    storm: int = option(200_000, "scheduler turns to simulate under injected faults (0: no simulation)", low=0, high=10**10)
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


@dataclass(frozen=True)
class RecordOptions:
    """Save the recording of a running engine. The file contains prompts and outputs as token ids."""

    name: str = option("", "the engine's --name (default: your only engine that records)")
    output: str = option("", "file to write (default: blinkpy-NAME-TIME.recording)")

    def __post_init__(self) -> None:
        if self.name:
            check_engine_name(self.name)


@dataclass(frozen=True)
class ReplayOptions:
    """Run a recording again, compare every decision with it, and explain what happened to each request."""

    file: str = option("", "recording from `blinkpy record` or of a crash")
    policy: str = option("", "FILE.py:FUNCTION; required if the engine's policy came from a file")
    request: int = option(-1, "report only on the request with this number (-1: on all requests)", low=-1, high=2**63 - 1)
    step: int = option(
        -1, "report every detail of the scheduler turn with this number (-1: a summary of all turns)", low=-1, high=2**63 - 1
    )
    trace: bool = option(True, "print one line per event")
    compiled: bool = option(False, "compile the scheduler first, which takes half a minute; faster for long recordings")
    workload: str = option("", "CSV file to write with lengths and arrival times of the requests, for `blinkpy check --workload`")
    timeline: str = option("", "file for a timeline of all requests (.svg, .html, or .png with matplotlib)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))


UP = "up"


@dataclass(frozen=True)
class RayOptions:
    """Start engines and front ends in a Ray cluster, then watch and scale them; Ctrl-C stops them in order."""

    action: str = option("", "'up CONFIG', with the path of a TOML file (docs/fleet.md)")
    address: str = option("", "address of a running cluster, HOST:PORT or auto (default: start one on this machine)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        verb, _, path = self.action.partition(" ")
        if verb != UP:
            raise ConfigError(
                f"unknown action {verb!r} of ray; use: ray up CONFIG" if verb else "missing action of ray; use: ray up CONFIG"
            )
        if not path:
            raise ConfigError("missing file; use: ray up CONFIG")

    @property
    def path(self) -> str:
        """The path of the plan."""
        return self.action.partition(" ")[2]


MOST_SERVERS = 64


@dataclass(frozen=True)
class TopOptions:
    """Watch running servers in a terminal; press q to quit. No API key is needed."""

    servers: str = option("http://127.0.0.1:8000", "URLs or HOST:PORT of the servers, separated by spaces")
    interval: float = option(2.0, "time between two updates, in seconds", low=0.2, high=3600)
    once: bool = option(False, "print one table and exit; this is the default if the output is not a terminal")
    insecure: bool = option(False, "accept any certificate from HTTPS servers")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        if not 1 <= len(self.urls) <= MOST_SERVERS:
            raise ConfigError(f"give 1 to {MOST_SERVERS} servers, not {len(self.urls)}")
        for url in self.urls:
            try:
                valid = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname and urlsplit(url).port != 0
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"a server must be a URL or HOST:PORT, not {url.removeprefix('http://')!r}")

    @property
    def urls(self) -> list[str]:
        """The servers, each once, as URLs."""
        given = (server if "://" in server else f"http://{server}" for server in self.servers.split())
        return list(dict.fromkeys(url.rstrip("/") for url in given))
