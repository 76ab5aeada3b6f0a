"""All options and limits, in one tree of dataclasses. The command line and `--config FILE` are generated from
it.

A field's metadata holds its help text, its bounds and the commands that have it as a flag. Values from all
sources are checked in the same way. Other modules, such as transports, add options by `extends`.
"""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from blinkpy.peer_options import PEER_OPTIONS

Options = TypeVar("Options")

TRANSPORTS: dict[str, str] = {}
"""The purpose of each transport, by name: blinkpy.transport.contract fills it."""
TOOL_CALL_PARSERS: dict[str, str] = {}
"""How models write tool calls, by name: blinkpy.dpu.tools.call_format fills it."""
REASONING_PARSERS: dict[str, str] = {}
"""How models mark reasoning, by name: blinkpy.dpu.tools.reasoning fills it."""
STEP_TOKENS = 2048
"""Tokens of a step, where steps have one size and nothing speaks for less."""
YIELD_STEPS = 16
"""Default number of consecutive steps in which best-effort prompts wait for latency-sensitive ones."""
CUT_STEP_TOKENS, SUSPEND_STEPS = 256, 16
"""Tokens up to which a step is not cut, and steps that may interrupt one, where nothing else is asked for."""
NGRAM, MTP = "ngram", "mtp"
DRAFT_TOKENS, DRAFT_MATCH = {NGRAM: 7, MTP: 3}, 8
"""Defaults of speculation: drafts of a request in a step by their origin, and tokens that must repeat before them."""
MOST_GROUPS = 255
"""Groups of layers of a step that is cut: a record has a byte for them."""
MOST_ENGINES = 64
"""Engines behind one front end."""
MOST_RANKS = 8
"""GPUs that hold one model together: those of a common machine."""
ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Of an engine, and of its segment below /dev/shm."""
DEFAULT_SLOTS = 256  # of a worker
NO_HITS = "a ring does not keep the first pages of a prompt"
_EXTENSIONS: dict[type, str] = {}  # dataclasses of options, and the sections that they extend

ENGINE, FRONT, LINK, ALL = "serve engine", "serve frontend", "engine frontend", "serve engine frontend"
# The commands that have the flags of a section.
COMMANDS = {
    **dict.fromkeys(("model", "cache", "scheduler", "queue", "engine"), ENGINE),
    "transport": LINK,
    **dict.fromkeys(("frontend", "access", "watch"), FRONT),
}


class ConfigError(ValueError):
    """blinkpy does not support an option, a model or a file. The message is one line for the user."""


def option(
    default: Any,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | Mapping[str, str] = (),
    commands: str = "",
    repeats: bool = False,
) -> Any:
    """A dataclass field that is an option.

    low, high: inclusive bounds.
    choices: allowed strings, or a mapping from them to descriptions.
    commands: names of the commands with the flag, if they differ from those of its section.
    repeats: the flag may be repeated; the values are joined by commas.
    """
    about = {"help": help, "low": low, "high": high, "choices": choices, "commands": commands, "repeats": repeats}
    return field(default=default, metadata=about)


def extends(section: str) -> Callable[[type[Options]], type[Options]]:
    """Decorate a frozen dataclass of options: it adds them to the section. Read their values by
    Config.extension(the class).
    """

    def add(kind: type[Options]) -> type[Options]:
        _EXTENSIONS[kind] = section
        return kind

    return add


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how it is loaded."""

    model: str = option("demo", "model to serve: a folder, a Hugging Face hub id, or 'demo' for the built-in model", commands=ALL)
    served_model_name: str = option("", "model name in the API (default: the value of --model)", commands=FRONT)
    dtype: str = option(
        "auto",
        "data type of weights and KV cache (auto: the checkpoint's, if the device supports it)",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = option(
        "auto",
        "quantization of the linear layers; auto: as stored in the checkpoint; fp8: convert to 8-bit "
        "floats while loading (docs/models.md)",
        choices=("auto", "fp8"),
    )
    load_format: str = option(
        "auto",
        "source of the weights; auto, safetensors: the checkpoint; dummy: random weights for any config.json",
        choices=("auto", "safetensors", "dummy"),
    )
    max_model_len: int = option(
        0,
        "maximum tokens per request, prompt and output together (0: the most that model and KV cache allow)",
        low=0,
        high=1 << 22,
    )
    chat_template: str = option("", "file with a Jinja chat template (default: the model's own)", commands=FRONT)
    tool_call_parser: str = option(
        "auto",
        "the model's format of tool calls (auto: by its template)",
        choices=TOOL_CALL_PARSERS,
        commands=FRONT,
    )
    reasoning_parser: str = option(
        "auto",
        "tags around the model's reasoning (auto: detected from its chat template)",
        choices=REASONING_PARSERS,
        commands=FRONT,
    )
    seed: int = option(0, "random seed of --load-format dummy", low=0, high=2**63 - 1)


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache."""

    page_size: int = option(16, "tokens per page of the KV cache; a power of two", low=4, high=256)
    num_pages: int = option(0, "pages of the KV cache (0: as many as fit into free memory)", low=0, high=1 << 24)
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory that blinkpy may use", low=0.05, high=0.98)
    cpu_cache_mib: int = option(256, "size of the KV cache on a CPU, in MiB, if num_pages is 0", low=1, high=1 << 20)
    enable_prefix_caching: bool = option(True, "reuse cached pages of prompts that start with the same tokens")
    state_snapshots: int = option(
        0,
        "snapshots of states, for the prefix cache of models with recurrent layers (0: up to 128, as memory "
        "permits; docs/models.md)",
        low=0,
        high=4096,
    )
    snapshot_tokens: int = option(
        4096,
        "prompt tokens between two snapshots of recurrent states, rounded up to a power of two; more snapshots are at the end of "
        "prompts and of common prefixes",
        low=1,
        high=1 << 22,
    )
    window_cache: str = option(
        "full",
        "KV cache of sliding-window layers; full: keep all tokens; ring: keep only the window, which "
        "saves memory but disables prefix caching (docs/models.md)",
        choices=("full", "ring"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of keys and values in the cache; auto: the model's; fp8_e4m3: half the memory of bfloat16 (docs/tuning.md)",
        choices=("auto", "fp8_e4m3"),
    )


@dataclass(frozen=True)
class BatchOptions:
    """Limits of a step, of `serve` and of the simulated server of `check`."""

    max_num_seqs: int = option(256, "maximum requests per step", low=1, high=4096)
    max_num_batched_tokens: int = option(
        0,
        "maximum tokens per step, decodes and prompt chunks together (0: 8192 on a GPU, or 2048 for "
        "models with experts; on a CPU, one second of work)",
        low=0,
        high=1 << 20,
    )
    mixed_step_tokens: int = option(
        0,
        "maximum tokens of a step with decodes and prompt chunks, outside a burst (0: 512 on "
        "a GPU for models without experts, else no such limit)",
        low=0,
        high=1 << 20,
    )
    burst_tokens: int = option(
        0, "waiting prompt tokens above which a burst begins, with larger steps (0: twice burst_step_tokens)", low=0, high=1 << 24
    )
    burst_step_tokens: int = option(
        0,
        "maximum tokens of a step with decodes during a burst of long prompts (0: 2048 on a GPU for "
        "models without experts; docs/tuning.md)",
        low=0,
        high=1 << 20,
    )
    yield_steps: int = option(
        YIELD_STEPS,
        "consecutive steps, and consecutive admissions, that latency-sensitive requests may take "
        "before best effort gets one (docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_step_tokens: int = option(
        0,
        "best-effort prompts may fill a step up to this many tokens, decodes included (0: no such limit; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    sensitive_step_tokens: int = option(
        0,
        "maximum prompt tokens of a step in which best-effort prompts yield to latency-sensitive ones "
        "(0: mixed_step_tokens; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_pages: float = option(
        1.0,
        "fraction of the KV cache's pages that best-effort requests may hold together (docs/policies.md)",
        low=0.001,
        high=1.0,
    )
    step_groups: int = option(
        1,
        "layer groups into which a step with best-effort prompts is cut; latency-sensitive prompts may "
        "suspend it between two groups (1: no cuts; docs/policies.md)",
        low=1,
        high=MOST_GROUPS,
    )
    cut_step_tokens: int = option(CUT_STEP_TOKENS, "steps with this many tokens or fewer are never cut", low=0, high=1 << 20)
    suspend_steps: int = option(SUSPEND_STEPS, "maximum steps that may run while one step is suspended", low=0, high=1 << 20)


@dataclass(frozen=True)
class SchedulerOptions(BatchOptions):
    """Batch limits, and the order in which requests are served."""

    tpot_target_ms: int = option(
        0,
        "target time per output token, in ms; while every request is ahead of it, steps are delayed to "
        "save energy (0: no delay; docs/tuning.md)",
        low=0,
        high=60_000,
    )
    flex_tpot_target_ms: int = option(
        0,
        "target time per output token of best-effort requests, in ms; not below tpot_target_ms (0: tpot_target_ms)",
        low=0,
        high=60_000,
    )
    speculative: str = option(
        "off",
        "drafts of the next tokens, which change no output: ngram takes earlier tokens of the request, mtp the checkpoint's own "
        "layer for drafts (docs/speculation.md)",
        choices=("off", NGRAM, MTP),
    )
    speculative_tokens: int = option(
        0, "maximum drafts of a request in one step, with --speculative (0: 7 with ngram, 3 with mtp)", low=0, high=31
    )
    speculative_match: int = option(
        DRAFT_MATCH, "tokens that must repeat before a request gets drafts, with --speculative ngram", low=2, high=64
    )
    policy: str = option(
        "short-prompts",
        "scheduling policy: fair, fcfs, priority, short-prompts, shortest-first, or FILE.py:FUNCTION (docs/policies.md)",
    )


@dataclass(frozen=True)
class QueueOptions:
    """Queue pairs between front ends and the engine."""

    slots: int = option(
        0, "maximum requests in flight per worker; further requests wait (0: 256, fewer if each has a large recurrent state)",
        low=0, high=65535,
    )  # fmt: skip
    sq_entries: int = option(
        0, "entries of a worker's submission ring; a power of two, at least slots (0: derived from slots)", low=0, high=1 << 20
    )
    cq_entries: int = option(8192, "entries of a worker's completion ring, 176 bytes each; a power of two", low=2, high=1 << 24)
    prompt_arena_tokens: int = option(
        0, "size of a worker's prompt arena, in tokens (0: derived from max_model_len)", low=0, high=1 << 28
    )
    grammar_arena_kib: int = option(
        0, "size of a worker's arena for grammars and token rules, in KiB (0: 4 times the largest grammar)", low=0, high=1 << 20
    )
    lease_ms: int = option(
        5000,
        "time without a heartbeat, in ms, after which a front end loses its queue pair and its requests",
        low=50,
        high=3_600_000,
    )
    engine_timeout_ms: int = option(
        2000,
        "time without a heartbeat, in ms, after which requests to the engine get a 503",
        low=50,
        high=3_600_000,
        commands=FRONT,
    )


@dataclass(frozen=True)
class EngineOptions:
    """Device, limits and checks of the engine."""

    device: str = option(
        "auto",
        "device that runs the model (auto: cuda if there is a GPU, else cpu; null: no model, synthetic tokens)",
        choices=("auto", "cpu", "cuda", "null"),
    )
    control: str = option(
        "auto", "processor that runs the scheduler (auto: gpu with --device cuda, else host)", choices=("auto", "gpu", "host")
    )
    name: str = option(
        "blinkpy",
        "name of the shared-memory segment, by which separately started engines and front ends find each other",
        commands=ALL,
    )
    threads: int = option(0, "threads of the CPU engine (0: one per core)", low=0, high=1024)
    null_step_us: int = option(0, "simulated time of a step of --device null, in us", low=0, high=10_000_000)
    batch_invariant: bool = option(
        False, "make a request's tokens independent of the other requests in its batch; slower (docs/tuning.md)"
    )
    grammar_slots: int = option(
        64,
        "maximum number of different grammars and token rules in use, divided evenly among workers (0: no grammars)",
        low=0,
        high=4096,
    )
    grammar_kib: int = option(
        1024, "maximum size of a request's token rules, and of its compiled grammar (1024 at most), in KiB", low=1, high=1 << 14
    )
    restart: bool = option(True, "restart an engine that died; off: the server exits with code 1", commands="serve")
    engine_hang_s: int = option(
        60,
        "time without progress of the engine's loop, in seconds, after which it is killed (0: never)",
        low=0,
        high=86_400,
        commands="serve",
    )
    data_parallel_size: int = option(
        1,
        "number of engines that share the requests, each on its own GPU (docs/fleet.md)",
        low=1,
        high=MOST_ENGINES,
        commands="serve",
    )
    tensor_parallel_size: int = option(
        1,
        "number of GPUs that hold one model together, each a part of every layer (docs/tensor-parallel.md)",
        low=1,
        high=MOST_RANKS,
    )
    check_integrity: str = option(
        "idle",
        "when to check the whole scheduler state; idle: while no request runs; always: after each turn",
        choices=("never", "idle", "always"),
    )
    record_steps: int = option(
        2048, "minimum number of steps that the flight recorder keeps (0: no recording)", low=0, high=1 << 16
    )
    record_folder: str = option("", "folder for recordings of crashes (default: ~/.local/state/blinkpy)")


@dataclass(frozen=True)
class TransportOptions:
    """The connection between separately started engines and front ends."""

    transport: str = option("shm", choices=TRANSPORTS)


@dataclass(frozen=True)
class FrontendOptions:
    """The HTTP server and its limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free port)", low=0, high=65535)
    workers: int = option(1, "number of front-end processes, each with its own queue pair", low=1, high=64, commands=ALL)
    worker_hang_s: int = option(
        120,
        "maximum time that a worker's event loop may block, in seconds; then the worker is replaced (0: no limit)",
        low=0,
        high=86_400,
    )
    api_key: str = option("", "API key; requests must send it as 'Authorization: Bearer KEY' (or set BLINKPY_API_KEY)")
    max_body_bytes: int = option(
        8 << 20, "maximum size of a request body, in bytes; beyond it the request gets a 413", low=1024, high=1 << 30
    )
    max_body_chunks: int = option(
        1024,
        "maximum number of small chunks in a chunked request body, in addition to one per 256 bytes; "
        "beyond it the request gets a 400",
        low=1,
        high=1 << 30,
    )
    max_body_values: int = option(
        1 << 20, "maximum number of JSON values in a request body; beyond it the request gets a 413", low=64, high=1 << 30
    )
    max_body_depth: int = option(
        128, "maximum nesting depth of a request body's JSON; beyond it the request gets a 400", low=8, high=1000
    )
    max_header_bytes: int = option(
        1 << 16,
        "maximum size of a request's headers, and of its chunk extensions and trailers, in bytes; beyond it "
        "the request gets a 431",
        low=1024,
        high=1 << 24,
    )
    max_header_count: int = option(
        128, "maximum number of headers per request; beyond it the request gets a 431", low=16, high=1 << 16
    )
    max_pipelined: int = option(
        1, "maximum number of pipelined requests that wait on a connection; beyond it the request gets a 400", low=0, high=1024
    )
    header_timeout_s: float = option(
        30.0, "time limit for receiving a request's headers, in seconds; then it gets a 408", low=0.1, high=3600
    )
    body_timeout_s: float = option(
        60.0, "time limit for receiving a request's body, in seconds; then it gets a 408", low=0.1, high=3600
    )
    send_timeout_s: float = option(
        60.0,
        "time without progress of a client that reads a response, in seconds, after which its connection is closed",
        low=0.1,
        high=3600,
    )
    close_timeout_s: float = option(
        10.0, "send_timeout_s for a connection whose last response has been written, in seconds", low=0.1, high=3600
    )
    body_budget_mib: int = option(
        128,
        "memory limit of a worker for request bodies, in MiB; bodies being received, "
        "and each of the two queues for tokenization, may use half of it",
        low=1,
        high=1 << 16,
    )
    unread_budget_mib: int = option(
        64,
        "memory of a worker for responses that clients have not read yet, in MiB; beyond it the "
        "longest-pending connection is closed",
        low=1,
        high=1 << 16,
    )
    answer_budget_mib: int = option(
        128,
        "memory of a worker for non-streamed responses in progress, in MiB; beyond it the largest one is replaced by a 503",
        low=1,
        high=1 << 16,
    )
    max_preparing: int = option(
        64,
        "maximum requests of a worker that wait for tokenization, separately for bodies up to 64 KiB "
        "and for larger bodies; beyond it the request gets a 429",
        low=1,
        high=1 << 16,
    )
    max_lag_ms: int = option(
        400,
        "maximum wait of requests up to 2 KiB for a busy worker, in ms; beyond it new POSTs get a 503",
        low=1,
        high=60_000,
    )
    prepare_ms: int = option(
        10_000,
        "CPU time limit for parsing and tokenizing a request above 64 KiB, in ms; then it gets a 413",
        low=10,
        high=3_600_000,
    )
    prepare_mib: int = option(
        1024,
        "memory limit for parsing and tokenizing a request above 64 KiB, in MiB; beyond it the request gets a 413",
        low=64,
        high=1 << 20,
    )
    max_output_backlog: int = option(
        4096, "maximum number of unread events of a stream; beyond it the request is cancelled", low=16, high=1 << 24
    )
    max_output_backlog_mib: int = option(
        8, "maximum unread data of a stream, in MiB; beyond it the request is cancelled", low=1, high=1 << 16
    )
    keep_alive_s: int = option(30, "time for which an idle connection is kept open, in seconds", low=1, high=3600)
    max_connections: int = option(
        4096,
        "maximum number of connections per worker; beyond it the longest-idle connection is closed, or the new one gets a 503",
        low=1,
        high=1 << 20,
    )
    grammar_compile_ms: int = option(
        2000, "CPU time limit for compiling a request's grammar, in ms; then the request gets a 400", low=10, high=60_000
    )
    grammar_compile_mib: int = option(
        128, "memory limit for compiling a request's grammar, in MiB; a worker compiles up to 8 at a time", low=16, high=1 << 16
    )
    response_store_mib: int = option(
        0,
        "memory for conversations of /v1/responses that 'previous_response_id' continues, in MiB (0: off); beyond it, "
        "the least recently used conversation of the key with the most memory is evicted; needs workers 1",
        low=0,
        high=1 << 14,
    )
    response_store_count: int = option(
        1000, "maximum number of stored conversations of a key; the least recently used is evicted", low=1, high=1 << 20
    )
    grammar_cache_mib: int = option(64, "memory of a worker for compiled grammars, in MiB", low=1, high=1 << 14)
    grammar_digits: int = option(
        20, "maximum digits before the decimal point, and after it, of numbers in structured output", low=1, high=400
    )
    shutdown_s: int = option(
        10, "time that running requests have to finish at shutdown, in seconds", low=0, high=3600, commands=ALL
    )
    handover: str = option(
        "",
        "Unix socket through which a newly started front end with the same options takes over the listening address",
        commands="frontend",
    )
    handover_s: int = option(
        600,
        "time that running requests of the old front end have to finish after a handover, in seconds",
        low=1,
        high=86_400,
        commands="frontend",
    )
    log_level: str = option("info", "minimum level of log lines", choices=("debug", "info", "warning", "error"), commands=ALL)


# Patterns of list entries in AccessOptions.
ORIGIN_LISTS = {
    "allowed_origins": r"\*|[a-z][a-z0-9+.-]*://[^\s/,\"]+",
    "allowed_methods": r"\*|[A-Z]+",
    "allowed_headers": r"\*|[A-Za-z0-9-]+",
}


@dataclass(frozen=True)
class AccessOptions:
    """Addresses, TLS, cross-origin requests (CORS), API keys and admission."""

    uds: str = option("", "Unix socket to listen on, instead of host and port")
    root_path: str = option("", "URL path under which a proxy exposes the server, such as /llm")
    ssl_certfile: str = option("", "file with the server's certificate chain (PEM); enables HTTPS")
    ssl_keyfile: str = option("", "file with the certificate's private key (default: ssl_certfile)")
    ssl_ca_certs: str = option("", "file with the certificate authorities that may sign client certificates (PEM)")
    ssl_cert_reqs: int = option(0, "client certificates (0: not requested, 1: verified if sent, 2: required)", low=0, high=2)
    allowed_origins: str = option(
        "", "origins whose web pages may call the server: a JSON list, or separated by commas; * allows any"
    )
    allowed_methods: str = option(
        "*", "HTTP methods that web pages of other origins may use: a JSON list, or separated by commas"
    )
    allowed_headers: str = option(
        "*", "request headers that web pages of other origins may send: a JSON list, or separated by commas"
    )
    allow_credentials: bool = option(False, "allow web pages of other origins to send cookies and other credentials")

    def __post_init__(self) -> None:
        root = self.root_path
        if root and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root):
            raise ConfigError(f"root_path must be a path such as /llm, without a trailing /, not {root!r}")
        for name, pattern in ORIGIN_LISTS.items():
            for entry in listed(getattr(self, name), name):
                if not re.fullmatch(pattern, entry):
                    raise ConfigError(f"{name}: {entry!r} is not a valid entry")
        if self.allow_credentials and "*" in listed(self.allowed_origins, "allowed_origins"):
            raise ConfigError("allow_credentials needs allowed_origins by name, not *")
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{name} needs ssl_certfile")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs")


@dataclass(frozen=True)
class WatchOptions:
    """Live page, logs, metrics and traces."""

    page: bool = option(True, "serve a live status page at /")
    access_log: bool = option(True, "log each finished request; successful GETs only at level debug")
    log_format: str = option("text", "format of log lines", choices=("text", "json"), commands=ALL)
    metrics_names: str = option(
        "blinkpy", "metric names in /metrics; vllm: vLLM's names in addition", choices=("blinkpy", "vllm")
    )
    otlp_traces_endpoint: str = option("", "URL to which a trace of each request is sent (OTLP over HTTP)")

    def __post_init__(self) -> None:
        url = self.otlp_traces_endpoint
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must begin with http:// or https://, not {url!r}")


@dataclass(frozen=True)
class Config:
    """The whole tree. Sections are grouped as in the documentation; option names are unique across sections."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    queue: QueueOptions = field(default_factory=QueueOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transport: TransportOptions = field(default_factory=TransportOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)
    extensions: Mapping[type, Any] = field(default_factory=dict)  # tables that differ from their defaults

    def __post_init__(self) -> None:
        values = as_table(self)
        for _, item in options():
            check_value(item, values[item.name])
        check_engine_name(self.engine.name)
        for name in ("page_size", "cq_entries", "sq_entries"):
            value = values[name]
            if value & (value - 1):
                raise ConfigError(f"{name} must be a power of two, not {value}")
        if 0 < self.queue.sq_entries < self.worker_slots:
            raise ConfigError(f"sq_entries ({self.queue.sq_entries}) must be at least slots ({self.worker_slots})")
        if self.frontend.response_store_mib and self.frontend.workers > 1:
            raise ConfigError(
                f"response_store_mib needs workers 1, not {self.frontend.workers}: each worker stores only its own responses"
            )
        if 0 < self.engine.grammar_slots < self.frontend.workers:
            raise ConfigError(
                f"grammar_slots ({self.engine.grammar_slots}) must be 0 or at least workers ({self.frontend.workers})"
            )
        check_step_sizes(self.scheduler, settled=False)
        check_class_sizes(self.scheduler)
        check_targets(self.scheduler)
        check_drafts(self.scheduler)

    @property
    def worker_slots(self) -> int:
        """Most requests in flight of a worker. An engine whose model has large recurrent states may settle for fewer."""
        return self.queue.slots or DEFAULT_SLOTS

    @property
    def all_slots(self) -> int:
        """The same for all workers of an engine."""
        return self.frontend.workers * self.worker_slots

    def extension(self, kind: type[Options]) -> Options:
        """The options that another module added. kind: their class."""
        return self.extensions.get(kind) or kind()

    def with_options(self, values: Mapping[str, Any]) -> Self:
        """A copy with some options replaced, by flat name. Raises ConfigError for an unknown name or invalid
        value.
        """
        homes = {item.name: kind for _, kind in _kinds() for item in dataclasses.fields(kind)}
        changes: dict[type, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in homes:
                raise ConfigError(f"unknown option {name!r}{meant(name, homes)}")
            changes.setdefault(homes[name], {})[name] = value
        sections, extensions = {}, {}
        for name, kind in _kinds():
            changed = dataclasses.replace(self._part(name, kind), **changes.get(kind, {}))
            if kind not in _EXTENSIONS:
                sections[name] = changed
            elif changed != kind():
                extensions[kind] = changed
        return dataclasses.replace(self, **sections, extensions=extensions)

    def _part(self, section: str, kind: type[Options]) -> Options:
        part: Options = self.extension(kind) if kind in _EXTENSIONS else getattr(self, section)
        return part


def _kinds() -> Iterator[tuple[str, Any]]:
    """(section name, class of options) of each section. Extensions follow their section."""
    for section in dataclasses.fields(Config):
        if section.name in COMMANDS:
            yield section.name, section.default_factory
            yield from ((section.name, kind) for kind, name in _EXTENSIONS.items() if name == section.name)


def options(command: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section name, field) of every option, in order. command: only options with a flag of this command."""
    for section, kind in _kinds():
        for item in dataclasses.fields(kind):
            if not command or command in (item.metadata["commands"] or COMMANDS[section]).split():
                yield section, item


def help_text(item: dataclasses.Field[Any]) -> str:
    """The help text of an option, or a list of its choices."""
    choices = item.metadata["choices"]
    return str(item.metadata["help"]) or "; ".join(f"{name}: {choices[name]}" for name in choices)


def option_type(item: dataclasses.Field[Any]) -> type:
    """The type of an option: str, int, float or bool."""
    names: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    return names[getattr(item.type, "__name__", str(item.type))]  # a string if annotations are strings


def check_value(item: dataclasses.Field[Any], value: Any) -> None:
    """Raise ConfigError unless the value has the field's type and is within its bounds."""
    wanted = option_type(item)
    accepted = (int, float) if wanted is float else (wanted,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{item.name} must be {wanted.__name__}, not {type(value).__name__} ({value!r})")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{item.name} contains a NUL character")
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ConfigError(f"{item.name} must be {low} to {high}, not {value}")
    if choices and value not in choices:
        raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {value!r}")


def check_engine_name(name: str) -> None:
    """Raise ConfigError for an engine name that is not a valid segment name."""
    if not ENGINE_NAME.fullmatch(name):
        rule = "1 to 100 letters, digits, '.', '_' and '-', the first one a letter or a digit"
        raise ConfigError(f"name must be {rule}, not {name!r}")


TARGETS = ("tpot_target_ms", "flex_tpot_target_ms")


def check_step_sizes(options: BatchOptions, *, settled: bool = True) -> None:
    """Raise ConfigError unless the step sizes are consistent. settled: False: step_sizes may still replace a
    0.
    """
    rows, most = options.max_num_seqs, options.max_num_batched_tokens
    mixed, burst_step = options.mixed_step_tokens, options.burst_step_tokens
    if 0 < most < rows:
        raise ConfigError(
            f"max_num_batched_tokens ({most}) must be at least max_num_seqs ({rows}): every running sequence gets a token in "
            "each step"
        )
    limit = most or 1 << 20
    if mixed and not 2 * rows <= mixed <= limit:
        raise ConfigError(
            f"mixed_step_tokens ({mixed}) must be at least twice max_num_seqs ({rows}), since half of a step is for prompts, and "
            f"at most max_num_batched_tokens ({most})"
        )
    if burst_step and not 0 < (mixed or int(not settled)) <= burst_step <= limit:
        raise ConfigError(
            f"burst_step_tokens ({burst_step}) needs mixed_step_tokens ({mixed}), and must be at least as much, and at most "
            f"max_num_batched_tokens ({most})"
        )


def check_class_sizes(options: BatchOptions) -> None:
    """Raise ConfigError unless the prompts of each class fit into the steps that are permitted to them."""
    rows, most = options.max_num_seqs, options.max_num_batched_tokens
    limit, share = most or 1 << 20, options.best_effort_step_tokens
    if options.sensitive_step_tokens > limit:
        raise ConfigError(
            f"sensitive_step_tokens ({options.sensitive_step_tokens}) must be at most max_num_batched_tokens ({most})"
        )
    if share and not 2 * rows <= share <= limit:
        raise ConfigError(
            f"best_effort_step_tokens ({share}) must be at least twice max_num_seqs ({rows}), since half of a step is for "
            f"prompts, and at most max_num_batched_tokens ({most})"
        )


def check_targets(options: SchedulerOptions) -> None:
    """Raise ConfigError if the target of best-effort requests is shorter than the general target."""
    target, flex = options.tpot_target_ms, options.flex_tpot_target_ms
    if 0 < flex < target:
        raise ConfigError(f"flex_tpot_target_ms ({flex}) must be at least tpot_target_ms ({target})")


def check_drafts(options: SchedulerOptions) -> None:
    """Raise ConfigError for sizes of drafts without an effect, or if no step has a row for a draft."""
    tokens, match = options.speculative_tokens, options.speculative_match
    if options.speculative == "off" and tokens:
        raise ConfigError(f"speculative_tokens ({tokens}) has no effect without drafts: set speculative to ngram or mtp")
    if options.speculative != NGRAM and match != DRAFT_MATCH:
        raise ConfigError(f"speculative_match ({match}) has no effect with speculative {options.speculative}: set it to ngram")
    if options.speculative == "off":
        return
    if options.max_num_seqs < 2:
        raise ConfigError(f"speculative {options.speculative} needs max_num_seqs of at least 2: drafts use the rows left over")


def step_sizes(options: SchedulerOptions, *, gpu: bool, experts: bool, tokens: int = STEP_TOKENS) -> dict[str, int]:
    """The options for the sizes of steps, with defaults filled in. Raises ConfigError if no such sizes fit
    the given options.

    experts: whether the model has experts.
    tokens: default size, if steps have one size.

    docs/tuning.md explains the sizes on a GPU. Steps have one size in these cases:
    - on other devices, because a step of thousands of tokens takes seconds
    - with experts, because a few hundred tokens use all of them, so small chunks cost nearly as much as large
      ones
    - if prompts would get less than half of a small step
    """
    rows, mixed, burst_step = options.max_num_seqs, options.mixed_step_tokens, options.burst_step_tokens
    several = gpu and not experts
    most = options.max_num_batched_tokens or max(rows, mixed, burst_step, 8192 if several else tokens)
    if several and not mixed and most > max(512, 2 * rows):
        mixed = max(512, 2 * rows)
    if gpu and mixed and not burst_step:
        burst_step = min(most, max(2048, mixed))
    sizes = {"max_num_batched_tokens": most, "mixed_step_tokens": mixed, "burst_step_tokens": burst_step}
    check_step_sizes(BatchOptions(max_num_seqs=rows, **sizes))
    return sizes


def check_asked(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if options that the user set, by flat name, exclude each other. A default would yield."""
    if values.get("window_cache") == "ring" and values.get("enable_prefix_caching"):
        raise ConfigError(f"enable_prefix_caching needs window_cache full: {NO_HITS}")
    if "response_store_count" in values and not values.get("response_store_mib"):
        raise ConfigError("response_store_count needs response_store_mib, since no response is stored without it")
    for name in ("api_key", "api_keys"):  # perhaps from an unset variable, which would disable authentication
        if values.get(name) == "":
            raise ConfigError(f"{name} is empty: leave it out if no key is needed")


def split_address(text: str, name: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host is in brackets. name: the option's name, for ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{name} must be HOST:PORT, not {text!r}")
    return host, int(port)


def listed(text: str, name: str) -> list[str]:
    """The entries of a list option: a JSON list of strings, as in vLLM, or text with commas.

    name: the option's name, for ConfigError.
    """
    if not text.startswith("["):
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a JSON list: {error}") from error
    if not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{name} must be a list of strings, not {text}")
    return list(entries)


def load_file(path: str | Path) -> dict[str, Any]:
    """Options of a TOML file by flat name, from the top level or from tables named like the sections.

    Raises ConfigError if the file can't be read, is not TOML, or contains an unknown section or option.
    """
    return option_values(read_toml(path), path)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError if it can't be read or is not TOML."""
    try:
        with open(path, "rb") as source:
            return tomllib.load(source)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def option_values(content: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Options by flat name, from the content of a file. Raises ConfigError for an unknown section or option."""
    home = {item.name: section for section, item in options()}
    values: dict[str, Any] = {}
    for key, value in content.items():
        # "model" is both a section and an option. A table is the section.
        entries = value.items() if key in COMMANDS and isinstance(value, dict) else ((key, value),)
        for name, entry in entries:
            if name not in home or (isinstance(value, dict) and home[name] != key):
                shown = f"{key}.{name}" if isinstance(value, dict) and name != key else name
                raise ConfigError(f"{path}: unknown option {shown!r}{meant(name, home)}")
            values[name] = entry
    return values


def meant(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, to append to a message, or "". An option of vLLM or SGLang gets advice by its name."""
    advice = PEER_OPTIONS.get(name.lstrip("-").replace("_", "-"))
    if advice is not None:
        return f": {advice}"
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def as_table(config: Config) -> Mapping[str, Any]:
    """All options by flat name, for display or for another process."""
    parts = [config._part(section, kind) for section, kind in _kinds()]
    return {item.name: getattr(part, item.name) for part in parts for item in dataclasses.fields(part)}
