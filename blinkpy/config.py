"""Every option and limit, in one tree of dataclasses. The command line and `--config FILE` are generated from it.

A field's metadata holds its help text, its bounds and the commands that have it as a flag. A value is checked in the same way
wherever it comes from. Modules that this one does not know, such as transports, add options by `extends`.
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

Options = TypeVar("Options")

TRANSPORTS: dict[str, str] = {}
"""What each transport is for, by name: blinkpy.transport.transport_kinds fills it."""
TOOL_CALL_PARSERS: dict[str, str] = {}
"""How models write tool calls, by name: blinkpy.dpu.tools.call_format fills it."""
REASONING_PARSERS: dict[str, str] = {}
"""How models mark reasoning, by name: blinkpy.dpu.tools.reasoning fills it."""
STEP_TOKENS = 2048
"""Tokens of a step, where steps have one size and nothing speaks for less."""
YIELD_STEPS = 16
"""Steps in a row in which best-effort prompts wait for latency-sensitive ones, where nothing else is asked for."""
CUT_STEP_TOKENS, SUSPEND_STEPS = 256, 16
"""Tokens up to which a step is not cut, and steps that may interrupt one, where nothing else is asked for."""
MOST_GROUPS = 255
"""Groups of layers of a step that is cut: a record has a byte for them."""
MOST_ENGINES = 64
"""Engines behind one front end."""
ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Of an engine, and of its segment below /dev/shm."""
NO_HITS = "window rings keep no page of a prompt's start"
_EXTENSIONS: dict[type, str] = {}  # dataclasses of options, and the sections that they extend

ENGINE, FRONT, LINK, ALL = "serve engine", "serve frontend", "engine frontend", "serve engine frontend"
# The commands that have the flags of a section.
COMMANDS = {
    **dict.fromkeys(("model", "cache", "scheduler", "queue", "engine"), ENGINE),
    "transport": LINK,
    **dict.fromkeys(("frontend", "access", "watch"), FRONT),
}


class ConfigError(ValueError):
    """An option, a model or a file that blinkpy can't work with. The message is one line, made for the user."""


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

    low, high: inclusive bounds. choices: allowed strings, or a mapping from them to what they mean. commands: names of the
    commands that have the flag, where these are not those of its section. repeats: the flag may be given several times; the value
    has commas between them.
    """
    about = {"help": help, "low": low, "high": high, "choices": choices, "commands": commands, "repeats": repeats}
    return field(default=default, metadata=about)


def extends(section: str) -> Callable[[type[Options]], type[Options]]:
    """Decorate a frozen dataclass of options: their flags and TOML names stand in the section, their values are those of
    Config.extension(the class)."""

    def add(kind: type[Options]) -> type[Options]:
        _EXTENSIONS[kind] = section
        return kind

    return add


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: str = option("demo", "folder, Hugging Face hub id, or 'demo' for the built-in model", commands=ALL)
    served_model_name: str = option("", "name in the API (default: the model argument)", commands=FRONT)
    dtype: str = option("auto", "type of weights and KV cache", choices=("auto", "float32", "bfloat16"))
    quantization: str = option(
        "auto",
        "as the checkpoint says (auto), or linear layers in 8-bit floats, quantised while they are loaded (fp8; docs/models.md)",
        choices=("auto", "fp8"),
    )
    load_format: str = option(
        "auto", "'dummy' makes random weights for any config.json", choices=("auto", "safetensors", "dummy")
    )
    max_model_len: int = option(0, "tokens of a sequence, prompt and output (0: what model and cache allow)", low=0, high=1 << 22)
    chat_template: str = option("", "file with a Jinja template (default: the model's own)", commands=FRONT)
    tool_call_parser: str = option(
        "auto", "how the model writes tool calls (auto: by its chat template)", choices=TOOL_CALL_PARSERS, commands=FRONT
    )
    reasoning_parser: str = option(
        "auto", "how the model marks its reasoning (auto: by its chat template)", choices=REASONING_PARSERS, commands=FRONT
    )
    seed: int = option(0, "seed of random weights", low=0, high=2**63 - 1)


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache."""

    page_size: int = option(16, "tokens of a page; a power of two", low=4, high=256)
    num_pages: int = option(0, "pages of the KV cache (0: sized from free memory)", low=0, high=1 << 24)
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that blinkpy may use", low=0.05, high=0.98)
    cpu_cache_mib: int = option(256, "KV cache of the CPU engine where num_pages is 0, MiB", low=1, high=1 << 20)
    enable_prefix_caching: bool = option(True, "reuse the pages of a common start of prompts")
    window_cache: str = option(
        "full",
        "layers with a window keep all tokens (full), or the window alone: less memory, no prefix caching (ring; docs/models.md)",
        choices=("full", "ring"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "the model's type (auto), or FP8: half the memory of bfloat16 (docs/tuning.md)",
        choices=("auto", "fp8_e4m3"),
    )


@dataclass(frozen=True)
class SchedulerOptions:
    """Limits of a batch, and the order in which requests are served."""

    max_num_seqs: int = option(256, "sequences in one step", low=1, high=4096)
    max_num_batched_tokens: int = option(
        0,
        "tokens in one step, decodes and chunks (0: 8192 on a GPU, 2048 with experts; a second's work on a CPU)",
        low=0,
        high=1 << 20,
    )
    mixed_step_tokens: int = option(
        0,
        "tokens in a mixed step while few prompt tokens wait (0: 512 on a GPU without experts)",
        low=0,
        high=1 << 20,
    )
    burst_tokens: int = option(0, "waiting prompt tokens that make a burst (0: twice burst_step_tokens)", low=0, high=1 << 24)
    burst_step_tokens: int = option(
        0,
        "as mixed_step_tokens, in a burst of long prompts (0: 2048 on a GPU without experts; docs/tuning.md)",
        low=0,
        high=1 << 20,
    )
    yield_steps: int = option(
        YIELD_STEPS,
        "steps in a row, and requests that go past, that best effort leaves to latency-sensitive ones (docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_step_tokens: int = option(
        0,
        "tokens of a step, decodes included, that best-effort prompts may fill (0: all; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    sensitive_step_tokens: int = option(
        0,
        "tokens of latency-sensitive prompts in a step that best effort waits for (0: mixed_step_tokens; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_pages: float = option(
        1.0,
        "share of the KV cache's pages for best-effort requests (docs/policies.md)",
        low=0.001,
        high=1.0,
    )
    step_groups: int = option(
        1,
        "groups of layers between which a step with best-effort prompts may be suspended: docs/policies.md (1: never)",
        low=1,
        high=MOST_GROUPS,
    )
    cut_step_tokens: int = option(CUT_STEP_TOKENS, "a step of as many tokens or fewer is never suspended", low=0, high=1 << 20)
    suspend_steps: int = option(SUSPEND_STEPS, "steps that may interrupt one step, at most", low=0, high=1 << 20)
    tpot_target_ms: int = option(
        0,
        "time per output token that is soon enough: steps are held, which saves energy (0: off; docs/tuning.md)",
        low=0,
        high=60_000,
    )
    flex_tpot_target_ms: int = option(
        0, "the same for best-effort requests, at least tpot_target_ms (0: tpot_target_ms)", low=0, high=60_000
    )
    policy: str = option("short-prompts", "fair, fcfs, priority, short-prompts, shortest-first, or FILE.py:FUNCTION")


@dataclass(frozen=True)
class QueueOptions:
    """Queue pairs between front ends and the engine."""

    slots: int = option(256, "requests in flight per worker; others wait", low=1, high=65535)
    sq_entries: int = option(0, "submission ring of a worker, a power of two (0: from slots)", low=0, high=1 << 20)
    cq_entries: int = option(8192, "entries of a worker's completion ring, 176 bytes each; a power of two", low=2, high=1 << 24)
    prompt_arena_tokens: int = option(0, "prompt arena of a worker, tokens (0: from max_model_len)", low=0, high=1 << 28)
    grammar_arena_kib: int = option(
        0, "arena of a worker for grammars and token rules, KiB (0: 16 of the largest)", low=0, high=1 << 20
    )
    lease_ms: int = option(5000, "a front end silent for so long loses its requests and queue pair", low=50, high=3_600_000)
    engine_timeout_ms: int = option(
        2000, "an engine silent for so long is answered with 503", low=50, high=3_600_000, commands=FRONT
    )


@dataclass(frozen=True)
class EngineOptions:
    """Where the model runs and who drives it."""

    device: str = option(
        "auto", "where the model runs; null: synthetic tokens, no model", choices=("auto", "cpu", "cuda", "null")
    )
    control: str = option("auto", "who runs the scheduler: the GPU or the host", choices=("auto", "gpu", "host"))
    name: str = option("blinkpy", "name of the shared-memory segment, for halves that are started apart", commands=ALL)
    threads: int = option(0, "threads of the CPU engine (0: one for each core)", low=0, high=1024)
    null_step_us: int = option(0, "time of a step of the null engine, us", low=0, high=10_000_000)
    batch_invariant: bool = option(
        False, "the same request gives the same tokens, whatever runs beside it; slower (docs/tuning.md)"
    )
    grammar_slots: int = option(
        64, "different grammars and token rules at a time; workers have even shares (0: none)", low=0, high=4096
    )
    grammar_kib: int = option(256, "largest token rules, and grammar as an automaton (256 at most), KiB", low=1, high=1 << 14)
    restart: bool = option(True, "start an engine that died again; off: the server ends with exit code 1", commands="serve")
    engine_hang_s: int = option(
        60,
        "seconds that the engine's loop may stand still before it is killed (0: it never is)",
        low=0,
        high=86_400,
        commands="serve",
    )
    data_parallel_size: int = option(
        1,
        "engines that share the requests, each on its own GPU (docs/fleet.md)",
        low=1,
        high=MOST_ENGINES,
        commands="serve",
    )
    check_integrity: str = option("idle", "when the whole scheduler state is checked", choices=("never", "idle", "always"))
    record_steps: int = option(2048, "steps that the flight recorder keeps at least (0: off)", low=0, high=1 << 16)
    record_folder: str = option("", "where the recording of a crash goes (default: ~/.local/state/blinkpy)")


@dataclass(frozen=True)
class TransportOptions:
    """How front ends and the engine reach each other when they are started separately."""

    transport: str = option("shm", choices=TRANSPORTS)


@dataclass(frozen=True)
class FrontendOptions:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free one)", low=0, high=65535)
    workers: int = option(1, "front-end processes, each with its queue pair", low=1, high=64, commands=ALL)
    api_key: str = option("", "key that requests must bring as 'Authorization: Bearer KEY' (or BLINKPY_API_KEY)")
    max_body_bytes: int = option(8 << 20, "largest request body", low=1024, high=1 << 30)
    max_body_chunks: int = option(
        1024, "chunks of a body that come with others in one piece, beside one for each 256 bytes", low=1, high=1 << 30
    )
    max_body_values: int = option(1 << 20, "values in a body's JSON", low=64, high=1 << 30)
    max_body_depth: int = option(128, "nesting of a body's JSON", low=8, high=1000)
    max_header_bytes: int = option(
        1 << 16, "bytes of a request's headers; again between and behind the pieces of its body", low=1024, high=1 << 24
    )
    max_header_count: int = option(128, "headers of a request", low=16, high=1 << 16)
    max_pipelined: int = option(1, "requests that a connection may send before the answer to the one before", low=0, high=1024)
    header_timeout_s: float = option(30.0, "seconds for a request's headers to arrive", low=0.1, high=3600)
    body_timeout_s: float = option(60.0, "seconds for a request's body to arrive", low=0.1, high=3600)
    send_timeout_s: float = option(60.0, "seconds in which a client must take more of an answer that waits", low=0.1, high=3600)
    close_timeout_s: float = option(10.0, "the same once the connection is to be closed", low=0.1, high=3600)
    body_mib_per_s: int = option(128, "pace at which a worker takes bodies, MiB/s; faster clients wait", low=1, high=1 << 20)
    body_room_mib: int = option(
        128,
        "memory of a worker for bodies, MiB: half for arriving ones, half for each queue of max_preparing",
        low=1,
        high=1 << 16,
    )
    unread_room_mib: int = option(64, "answers that clients of a worker may leave unread, MiB", low=1, high=1 << 16)
    answer_room_mib: int = option(
        128,
        "memory of a worker for whole answers that are being generated, MiB; beyond it the largest one ends",
        low=1,
        high=1 << 16,
    )
    max_preparing: int = option(
        64,
        "requests of a worker that wait to be tokenized, up to 64 KiB each, and again larger ones; more get 429",
        low=1,
        high=1 << 16,
    )
    max_lag_ms: int = option(
        400,
        "ms that a request up to 2 KiB may wait for its worker to begin with it; then new POSTs get 503",
        low=1,
        high=60_000,
    )
    prepare_ms: int = option(10_000, "CPU time to parse and tokenize a request above 64 KiB", low=10, high=3_600_000)
    prepare_mib: int = option(1024, "memory for the same, MiB", low=64, high=1 << 20)
    max_output_backlog: int = option(
        4096, "events a client may leave unread before its request is cancelled", low=16, high=1 << 24
    )
    max_output_backlog_mib: int = option(8, "the same in MiB", low=1, high=1 << 16)
    keep_alive_s: int = option(30, "seconds an idle connection is kept", low=1, high=3600)
    max_connections: int = option(
        4096, "open connections per worker; one more ends the longest idle one, or gets 503", low=1, high=1 << 20
    )
    grammar_compile_ms: int = option(2000, "CPU time to compile a request's grammar", low=10, high=60_000)
    grammar_compile_mib: int = option(
        128, "memory for the same, MiB; a worker compiles up to 8 grammars at a time", low=16, high=1 << 16
    )
    grammar_cache_mib: int = option(64, "compiled grammars that a worker keeps, MiB", low=1, high=1 << 14)
    shutdown_s: int = option(10, "seconds that running requests get at shutdown", low=0, high=3600, commands=ALL)
    handover: str = option(
        "",
        "Unix socket where a front end that is started with the same options takes over the address of the one that serves",
        commands="frontend",
    )
    handover_s: int = option(
        600, "seconds that running requests of the one before get then", low=1, high=86_400, commands="frontend"
    )
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"), commands=ALL)


# What the entries of lists of AccessOptions look like.
ORIGIN_LISTS = {
    "allowed_origins": r"\*|[a-z][a-z0-9+.-]*://[^\s/,\"]+",
    "allowed_methods": r"\*|[A-Z]+",
    "allowed_headers": r"\*|[A-Za-z0-9-]+",
}


@dataclass(frozen=True)
class AccessOptions:
    """Who reaches the HTTP server, and how."""

    uds: str = option("", "Unix socket to listen on, in place of host and port")
    root_path: str = option("", "path below which a proxy shows the server, such as /llm")
    ssl_certfile: str = option("", "the server's certificate and its chain (PEM): serve HTTPS")
    ssl_keyfile: str = option("", "the certificate's private key (default: in ssl_certfile)")
    ssl_ca_certs: str = option("", "authorities that sign clients' certificates, for ssl_cert_reqs")
    ssl_cert_reqs: int = option(0, "clients' certificates (0: not asked for, 1: checked if there, 2: needed)", low=0, high=2)
    allowed_origins: str = option("", "origins whose pages may call the server, as a JSON list or with commas; * is any")
    allowed_methods: str = option("*", "methods of such pages")
    allowed_headers: str = option("*", "headers of such pages")
    allow_credentials: bool = option(False, "such pages may send cookies and the like")

    def __post_init__(self) -> None:
        root = self.root_path
        if root and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root):
            raise ConfigError(f"root_path must be a path such as /llm, without / at its end, not {root!r}")
        for name, pattern in ORIGIN_LISTS.items():
            for entry in listed(getattr(self, name), name):
                if not re.fullmatch(pattern, entry):
                    raise ConfigError(f"{name} can't hold {entry!r}")
        if self.allow_credentials and "*" in listed(self.allowed_origins, "allowed_origins"):
            raise ConfigError("allow_credentials needs allowed_origins by name, not *")
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{name} needs ssl_certfile")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs")


@dataclass(frozen=True)
class WatchOptions:
    """What the server tells about itself."""

    page: bool = option(True, "a live page at /")
    access_log: bool = option(True, "a log line at the end of each request; a GET that went well only at level debug")
    log_format: str = option("text", "how log lines look", choices=("text", "json"), commands=ALL)
    metrics_names: str = option("blinkpy", "names in /metrics; vllm: also vLLM's", choices=("blinkpy", "vllm"))
    otlp_traces_endpoint: str = option("", "URL for a trace of each request (OTLP over HTTP)")

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
    extensions: Mapping[type, Any] = field(default_factory=dict)  # those that differ from their defaults

    def __post_init__(self) -> None:
        values = as_table(self)
        for _, item in options():
            check_value(item, values[item.name])
        check_engine_name(self.engine.name)
        for name in ("page_size", "cq_entries", "sq_entries"):
            value = values[name]
            if value & (value - 1):
                raise ConfigError(f"{name} must be a power of two, not {value}")
        if 0 < self.queue.sq_entries < self.queue.slots:
            raise ConfigError(f"sq_entries ({self.queue.sq_entries}) must be at least slots ({self.queue.slots})")
        if 0 < self.engine.grammar_slots < self.frontend.workers:
            raise ConfigError(
                f"grammar_slots ({self.engine.grammar_slots}) must be 0 or at least workers ({self.frontend.workers})"
            )
        check_step_sizes(*(values[name] for name in STEP_SIZES), settled=False)
        check_class_sizes(*(values[name] for name in CLASS_SIZES))
        check_targets(*(values[name] for name in TARGETS))

    def extension(self, kind: type[Options]) -> Options:
        """Options that another module added; kind: their class."""
        return self.extensions.get(kind) or kind()

    def with_options(self, values: Mapping[str, Any]) -> Self:
        """A copy with options replaced, by their flat names. Raises ConfigError for an unknown name or a bad value."""
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
    """(section name, class of options), extensions behind what they extend."""
    for section in dataclasses.fields(Config):
        if section.name in COMMANDS:
            yield section.name, section.default_factory
            yield from ((section.name, kind) for kind, name in _EXTENSIONS.items() if name == section.name)


def options(command: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section name, field) of every option, in order; of a command, those that it has as flags."""
    for section, kind in _kinds():
        for item in dataclasses.fields(kind):
            if not command or command in (item.metadata["commands"] or COMMANDS[section]).split():
                yield section, item


def help_text(item: dataclasses.Field[Any]) -> str:
    """What an option is for; of one without a text of its own, what its choices are."""
    choices = item.metadata["choices"]
    return str(item.metadata["help"]) or "; ".join(f"{name}: {choices[name]}" for name in choices)


def option_type(item: dataclasses.Field[Any]) -> type:
    """str, int, float or bool."""
    names: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    return names[getattr(item.type, "__name__", str(item.type))]  # a string where annotations are


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
    """Raise ConfigError for a name of an engine that no segment can have."""
    if not ENGINE_NAME.fullmatch(name):
        rule = "1 to 100 letters, digits, '.', '_' and '-', the first one a letter or a digit"
        raise ConfigError(f"name must be {rule}, not {name!r}")


STEP_SIZES = ("max_num_seqs", "max_num_batched_tokens", "mixed_step_tokens", "burst_step_tokens")
TARGETS = ("tpot_target_ms", "flex_tpot_target_ms")
CLASS_SIZES = ("max_num_seqs", "max_num_batched_tokens", "best_effort_step_tokens", "sensitive_step_tokens")


def check_step_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, mixed_step_tokens: int, burst_step_tokens: int, *, settled: bool = True
) -> None:
    """Raise ConfigError unless the sizes of steps fit each other. settled: what is 0 stays so; otherwise step_sizes may still
    choose it."""
    if 0 < max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}): "
            "every running sequence gets a token in each step"
        )
    most = max_num_batched_tokens or 1 << 20  # 0: still to be chosen, by step_sizes
    if mixed_step_tokens and not 2 * max_num_seqs <= mixed_step_tokens <= most:
        raise ConfigError(
            f"mixed_step_tokens ({mixed_step_tokens}) must be at least twice max_num_seqs ({max_num_seqs}), since half of a step "
            f"is for prompts, and at most max_num_batched_tokens ({max_num_batched_tokens})"
        )
    mixed = mixed_step_tokens or (0 if settled else 1)
    if burst_step_tokens and not 0 < mixed <= burst_step_tokens <= most:
        raise ConfigError(
            f"burst_step_tokens ({burst_step_tokens}) needs mixed_step_tokens ({mixed_step_tokens}), and must be at least "
            f"as much, and at most max_num_batched_tokens ({max_num_batched_tokens})"
        )


def check_class_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, best_effort_step_tokens: int, sensitive_step_tokens: int
) -> None:
    """Raise ConfigError unless the prompts of each class fit into the steps that they may fill. max_num_batched_tokens: 0 while
    it is still to be chosen."""
    most = max_num_batched_tokens or 1 << 20
    if sensitive_step_tokens > most:
        raise ConfigError(
            f"sensitive_step_tokens ({sensitive_step_tokens}) must be at most max_num_batched_tokens ({max_num_batched_tokens})"
        )
    if best_effort_step_tokens and not 2 * max_num_seqs <= best_effort_step_tokens <= most:
        raise ConfigError(
            f"best_effort_step_tokens ({best_effort_step_tokens}) must be at least twice max_num_seqs ({max_num_seqs}), since "
            f"half of a step is for prompts, and at most max_num_batched_tokens ({max_num_batched_tokens})"
        )


def check_targets(tpot_target_ms: float, flex_tpot_target_ms: float) -> None:
    """Raise ConfigError unless best effort's target is the longer one."""
    if 0 < flex_tpot_target_ms < tpot_target_ms:
        raise ConfigError(f"flex_tpot_target_ms ({flex_tpot_target_ms}) must be at least tpot_target_ms ({tpot_target_ms})")


def step_sizes(options: SchedulerOptions, *, gpu: bool, experts: bool, tokens: int = STEP_TOKENS) -> dict[str, int]:
    """The options that make up the steps' sizes, with what is in force where they were left open. experts: whether there are any.
    tokens: of steps that have one size.

    docs/tuning.md explains the sizes on a GPU. Steps have one size elsewhere, where a step of thousands of tokens
    takes seconds; with experts, since a few hundred tokens use all of them, so small chunks cost nearly as much as large ones;
    and where half of a small step would not be left for prompts. Raises ConfigError where what was given fits no such choice.
    """
    rows, mixed, burst_step = options.max_num_seqs, options.mixed_step_tokens, options.burst_step_tokens
    several = gpu and not experts
    most = options.max_num_batched_tokens or max(rows, mixed, burst_step, 8192 if several else tokens)
    if several and not mixed and most > max(512, 2 * rows):
        mixed = max(512, 2 * rows)
    if gpu and mixed and not burst_step:
        burst_step = min(most, max(2048, mixed))
    check_step_sizes(rows, most, mixed, burst_step)
    return {"max_num_batched_tokens": most, "mixed_step_tokens": mixed, "burst_step_tokens": burst_step}


def check_asked(values: Mapping[str, Any]) -> None:
    """Raise ConfigError where options that somebody set, by flat name, exclude each other, though a default gives way."""
    if values.get("window_cache") == "ring" and values.get("enable_prefix_caching"):
        raise ConfigError(f"enable_prefix_caching needs window_cache full: {NO_HITS}")
    for name in ("api_key", "api_keys"):  # of a variable that is not set, perhaps: everybody would be let in
        if values.get(name) == "":
            raise ConfigError(f"{name} is empty: leave it out where no key is needed")


def split_address(text: str, name: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host is in brackets. name: of the option, for ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{name} must be HOST:PORT, not {text!r}")
    return host, int(port)


def listed(text: str, name: str) -> list[str]:
    """The entries of a list option: a JSON list of strings, as vLLM has it, or text with commas. name: for ConfigError."""
    if not text.startswith("["):
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON list: {error}") from error
    if not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{name} must be a list of strings, not {text}")
    return list(entries)


def load_file(path: str | Path) -> dict[str, Any]:
    """Options of a TOML file by flat name, from the top level or from tables named like the sections.

    Raises ConfigError when the file can't be read, is not TOML, or holds an unknown section or option.
    """
    return option_values(read_toml(path), path)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError when it can't be read, or is not TOML."""
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
        # "model" is a section and an option: a table is the section.
        entries = value.items() if key in COMMANDS and isinstance(value, dict) else ((key, value),)
        for name, entry in entries:
            if name not in home or (isinstance(value, dict) and home[name] != key):
                shown = f"{key}.{name}" if isinstance(value, dict) and name != key else name
                raise ConfigError(f"{path}: unknown option {shown!r}{meant(name, home)}")
            values[name] = entry
    return values


def meant(name: str, known: Iterable[str]) -> str:
    """A guess at what somebody meant who gave an unknown name, for the end of a message; "" without one."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def as_table(config: Config) -> Mapping[str, Any]:
    """All options by flat name, for display and for handing a config to another process."""
    parts = [config._part(section, kind) for section, kind in _kinds()]
    return {item.name: getattr(part, item.name) for part in parts for item in dataclasses.fields(part)}
