"""Options of the model, its KV cache, the queue pairs and the engine."""

import re
from dataclasses import dataclass

from blinkpy.config.option_fields import ALL, FRONT, ConfigError, option

TOOL_CALL_PARSERS: dict[str, str] = {}
"""How models write tool calls, by name: blinkpy.dpu.tools.call_format fills it."""
REASONING_PARSERS: dict[str, str] = {}
"""How models mark reasoning, by name: blinkpy.dpu.tools.reasoning fills it."""
MOST_ENGINES = 64
"""Maximum engines behind one front end."""
MOST_RANKS = 8
"""Maximum GPUs that hold one model together: those of one machine."""
ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""The name of an engine, and of its segment in /dev/shm."""
DEFAULT_SLOTS = 256  # of a worker
NO_HITS = "a ring does not keep the first pages of a prompt"


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
    speculative_model: str = option(
        "", "EAGLE-3 head of the model, which drafts tokens: a folder, or a Hugging Face hub id (docs/speculation.md)"
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
        "prompt tokens between two snapshots of recurrent states, rounded up to a power of two; further snapshots are at the "
        "end of prompts and common prefixes",
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


def check_engine_name(name: str) -> None:
    """Raise ConfigError for an engine name that is not a valid segment name."""
    if not ENGINE_NAME.fullmatch(name):
        rule = "1 to 100 letters, digits, '.', '_' and '-', the first one a letter or a digit"
        raise ConfigError(f"name must be {rule}, not {name!r}")
