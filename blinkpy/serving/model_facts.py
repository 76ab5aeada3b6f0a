"""The facts of a model, without reading its weights: its kind, its memory, unsupported features, and runs on a GPU. No torch.

tools/write_tried_widths.py generates `tried_widths.json` from benchmarks/results/published_widths.json (`make docs`).
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from blinkpy.config import Config, ConfigError, step_sizes
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.devices.cuda_device import MINIMUM_TOKENS
from blinkpy.engine.sizing import engine_sizes, pages_for
from blinkpy.model_files import read_json
from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.rope_tables import NONE, Rope
from blinkpy.models.description.split import Share
from blinkpy.models.families.family import describe_model
from blinkpy.models.gpu.gpu_memory_plan import plan_memory, require_kernels, slots_that_fit, snapshots_that_fit
from blinkpy.models.paged_cache import RingSizes, cache_itemsize, page_bytes_of, ring_sizes
from blinkpy.models.weights.checkpoint import as_stored, check_names, open_checkpoint
from blinkpy.models.weights.head_loader import with_draft_head
from blinkpy.models.weights.model_folder import find_head, names_on_hub
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import all_parts, layer_parts, outer_parts
from blinkpy.models.weights.rank_checkpoint import rank_description

FILE = Path(__file__).with_name("tried_widths.json")


class Tried(NamedTuple):
    """One run on a GPU."""

    form: str  # "bfloat16", "fp8" (a scale for each row), "fp8_blocks", "mxfp4", "w4a16" or "nvfp4"
    kv_cache: str  # value of --kv-cache-dtype
    gpu: str
    agrees: bool  # whether log probabilities were within the test's limit
    largest_error: float | None  # of a log probability
    date: str
    commit: str

    @property
    def text(self) -> str:
        """The result as text."""
        cache = "" if self.kv_cache == "auto" else f" with a cache of {self.kv_cache}"
        error = "" if self.largest_error is None else f", largest error {self.largest_error:.2g}"
        return f"{self.form}{cache} {'agrees' if self.agrees else 'differs'}{error} ({self.gpu}, {self.date[:10]})"


def widths_of(model: DecoderDescription) -> str:
    """The sizes that determine the kernels of a model's layers, as a key. Models with equal sizes share results."""
    mlps = []
    for mlp in model.mlps:
        if isinstance(mlp, Experts):
            mlps.append(f"experts {mlp.number} top {mlp.top_k} of {mlp.size} shared {mlp.shared}")
        else:
            mlps.append(f"mlp {mlp.size}")
    sizes = dict.fromkeys((layer.attention.kv_heads, layer.attention.head_dim) for layer in model.layers)
    attention = " ".join(f"heads {model.heads} over {kv_heads} of {head_dim}" for kv_heads, head_dim in sizes)
    return f"{model.name} hidden {model.hidden_size} {attention} {' '.join(sorted(mlps))}"


def tried(model: DecoderDescription, path: Path = FILE) -> list[Tried]:
    """The GPU runs of models with these widths, in file order. Raises ConfigError for a damaged file."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return [Tried(**run) for run in document["runs"].get(widths_of(model), [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a list of runs on GPUs: {error}; install blinkpy again") from error


GPUS = {"H100, 80 GB": 79 << 30, "H200, 141 GB": 139 << 30}  # approximate memory, bytes
ATTENTION = ("qkv", "qkv_bias", "o", "o_bias", "q_norm", "k_norm", "sinks", "q_b", "kv_b")
PROBE_CHARACTERS = 1 << 16  # characters of the text that probes a chat template
T = TypeVar("T")
logger = logging.getLogger("blinkpy.engine")
LOGGERS = ("blinkpy.engine", "blinkpy.frontend")


class GpuFit(NamedTuple):
    """How a model fits on a GPU.

    context: longest sequence, tokens. cached: total tokens of all sequences. problem: why it does not fit, or "". slots: maximum
    requests in flight per worker.
    """

    gpu: str
    context: int
    cached: int
    problem: str
    slots: int = 0


@dataclass
class ModelFacts:
    """Facts of a model. Bytes are for the serving dtype.

    problems: reasons why it can't be served, as in error messages.
    notes: warnings from the log.
    """

    model_class: str = "?"
    quantization: str = "none"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shape: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)  # by part
    active_parameters: int = 0  # used by one token
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by part
    cache_dtype: str = "?"
    cache_bytes_per_token: int = 0  # of layers without a window ring
    ring_bytes_per_slot: int = 0
    state_bytes_per_slot: int = 0  # of recurrent layers
    gpus: list[GpuFit] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)  # runs on GPUs of models with these widths
    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)


def model_facts(folder: Path, config: Config, *, hub_id: str, gpus: dict[str, int]) -> ModelFacts:
    """The facts of a model's folder. Raises ConfigError if config.json can't be read.

    hub_id: id of the weights on the hub; "": they are in the folder.
    gpus: bytes of memory by name.
    """
    facts = ModelFacts()
    raw = read_json(folder, "config.json")
    names = raw.get("architectures")
    facts.model_class = str(names[0] if isinstance(names, list) and names else raw.get("model_type", "?"))
    quantized = raw.get("quantization_config")
    if quantized is not None:
        facts.quantization = str(quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized)[:80]
    with _collected(facts.notes):
        model = _tried(facts, lambda: describe_model(folder, config.model.quantization))
        if model is not None:
            scheme = model.packing or model.quantization
            if scheme is not None:
                facts.quantization = scheme.text
            model = _tried(facts, partial(_with_head, model, config.model.speculative_model)) or model
            _add_model(facts, model, config, gpus)
            _tried(facts, lambda: _check_tensors(model, folder, hub_id))
        tokenizer = _tried(facts, lambda: Tokenizer(folder))
        if tokenizer is not None:
            _tried(facts, lambda: _add_text(facts, tokenizer, model, config))
    return facts


def _with_head(model: DecoderDescription, head: str) -> DecoderDescription:
    """The description with a draft head. The head's tensors are checked if it is in a local folder. head: its folder, or ""."""
    if not head:
        return model
    local = Path(head).expanduser().exists()
    if model.recurrence is not None:
        raise ConfigError(f"speculative_model does not support {model.name}, which has recurrent states")
    return with_draft_head(model, find_head(head, weights=local), weights=local)


def _check_tensors(model: DecoderDescription, folder: Path, hub_id: str) -> None:
    """Raise ConfigError unless the checkpoint has the model's tensors. On the hub, only their names are checked; in a local
    folder, also their headers.
    """
    if hub_id:
        names = names_on_hub(folder, hub_id)
        if names is None:
            logger.warning("%s: the names of its tensors were not checked, since the hub provides no header", hub_id)
        else:
            check_names(model, names, hub_id)
    else:
        open_checkpoint(as_stored(model, folder), folder)


def itemsize_of(model: DecoderDescription, config: Config) -> int:
    """Bytes of a weight on a GPU. float16 is converted to bfloat16."""
    return 4 if "float32" in (config.model.dtype, model.dtype if config.model.dtype == "auto" else "") else 2


def fit(model: DecoderDescription, config: Config, gpu: str, total: int) -> GpuFit:
    """How a model fits on GPUs with `total` free bytes each, by the arithmetic of an engine's start.

    config: tensor_parallel_size is the number of GPUs that share the model.
    """
    itemsize, asked, page_size = itemsize_of(model, config), config.model.max_model_len, config.cache.page_size
    ranks = config.engine.tensor_parallel_size
    try:
        model = rank_description(model, Share(0, ranks))
        require_kernels(model)
        config = config.with_options(step_sizes(config.scheduler, gpu=True, experts=any(model.expert_layers)))
        page_bytes = page_bytes_of(config, model, itemsize)
        plan = plan_memory(config, model, itemsize, page_bytes, total, total, ranks=ranks)
        if not config.queue.slots:
            config = config.with_options({"slots": slots_that_fit(plan, config, model, itemsize)})
            plan = plan_memory(config, model, itemsize, page_bytes, total, total, ranks=ranks)
        if snapshots := snapshots_that_fit(plan, config, model, itemsize):
            with_snapshots = config.with_options({"state_snapshots": snapshots})
            plan = plan_memory(with_snapshots, model, itemsize, page_bytes, total, total, ranks=ranks)
        plan.require(pages_for(asked or MINIMUM_TOKENS, page_size) * page_bytes)
        sizes = engine_sizes(config, model.max_position if asked else model.default_context, page_bytes, plan.cache)
    except ConfigError as error:
        return GpuFit(gpu, 0, 0, str(error))
    return GpuFit(gpu, sizes.max_model_len, sizes.num_pages * page_size, "", sizes.queue.slots)


OUTER = {"final_norm": "norms", "lm_head": "output", "layer_projection_norm": "norms"}
OUTER |= dict.fromkeys(("layer_embedding", "layer_projection"), "layer embeddings")


def by_part(model: DecoderDescription, number: Callable[[Part], int]) -> dict[str, int]:
    """For each part of the decoder, the sum of `number` over its weights."""
    found: Counter[str] = Counter()
    for part in outer_parts(model):
        found[OUTER.get(part.field, part.field)] += number(part)
    for layer in range(len(model.layers)):
        for part in layer_parts(model, layer):
            found[_part_of(part.field, isinstance(model.layers[layer].mlp, Experts))] += number(part)
    if model.draft_head is not None:
        found["draft head"] = sum(number(part) for part in all_parts(model.draft_head))
    return dict(found)


def _part_of(name: str, of_experts: bool) -> str:
    if name in ATTENTION or name.startswith(("delta_", "recurrent_", "space_")):
        return "attention"
    if name in ("layer_input_gate", "layer_input_projection"):
        return OUTER["layer_embedding"]
    if name.startswith("shared") and not name.endswith("norm"):
        return "shared experts"
    if name in ("router", "router_bias", "selection_bias", "expert_factors"):
        return "routers"
    return "norms" if name.endswith(("norm", "layer_scale")) else "experts" if of_experts else "dense MLPs"


def _add_model(facts: ModelFacts, model: DecoderDescription, config: Config, gpus: dict[str, int]) -> None:
    itemsize, experts = itemsize_of(model, config), model.experts
    facts.shape = {
        "layers": len(model.layers),
        "hidden size": model.hidden_size,
        "heads": model.heads,
        "key and value heads": _each(layer.attention.kv_heads for layer in model.layers),
        "head size": _each(layer.attention.head_dim for layer in model.layers),
        "vocabulary": model.vocab_size,
        "dtype": model.dtype,
        "tied embeddings": model.tied_embeddings,
    }
    if experts.number:
        facts.shape |= {"experts": experts.number, "experts of a token": experts.top_k}
    windows = sorted({layer.attention.window for layer in model.layers} - {0})
    if model.recurrence is not None:
        facts.shape |= {"recurrent layers": model.recurrent_layers}
    facts.context = {"default": model.default_context, "longest": model.max_position, "windows": windows}
    facts.context["rope"] = "; ".join(_spelled(rope) for rope in model.ropes)
    facts.parameters = by_part(model, lambda part: part.parameters)
    facts.weight_bytes = by_part(model, lambda part: part.nbytes(itemsize))
    total, routed = sum(facts.parameters.values()), facts.parameters.get("experts", 0)
    facts.active_parameters = total - (routed - routed * experts.top_k // experts.number if routed else 0)
    rings = _tried(facts, lambda: ring_sizes(config, model))
    cached, own = cache_itemsize(config, itemsize), "float32" if itemsize == 4 else "bfloat16"
    facts.cache_dtype = own if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    facts.cache_bytes_per_token = model.cached_elements(rings.layers if rings else ()) * cached
    facts.cache_bytes_per_token += model.draft_head.kv_elements * itemsize if model.draft_head is not None else 0
    facts.ring_bytes_per_slot = _ring_bytes_per_slot(model, rings, cached)
    facts.state_bytes_per_slot = model.state_bytes(itemsize, config.scheduler.draft_tokens)
    facts.tried = tried(model)
    each = f"{ranks} x " if (ranks := config.engine.tensor_parallel_size) > 1 else ""
    facts.gpus = [fit(model, config, each + gpu, size) for gpu, size in gpus.items()]
    if all(one.problem for one in facts.gpus):
        facts.notes.append("it fits on none of these GPUs")


def _ring_bytes_per_slot(model: DecoderDescription, rings: RingSizes | None, itemsize: int) -> int:
    if rings is None:
        return 0
    of_token = sum(model.layers[layer].attention.cached_size for layer in rings.layers)
    return of_token * rings.pages * rings.page_size * itemsize


def _each(numbers: Iterable[int]) -> int | str:
    """The common number, or else all distinct numbers in layer order."""
    found = list(dict.fromkeys(numbers))
    return found[0] if len(found) == 1 else ", ".join(map(str, found))


def _spelled(rope: Rope) -> str:
    factor = f", factor {rope.factor:g}" if rope.factor > 1 else ""
    original = f", {rope.original_max_position:,} tokens before" if rope.original_max_position else ""
    return rope.kind if rope.kind == NONE else f"{rope.kind}, theta {rope.theta:g}{factor}{original}"


def _add_text(facts: ModelFacts, tokenizer: Tokenizer, model: DecoderDescription | None, config: Config) -> None:
    ids = tokenizer.encode("x").tolist()
    template = load_template(tokenizer.folder, tokenizer.config, "", PROBE_CHARACTERS)
    dialect = ChatDialect(template, config.model, tokenizer.model_type)
    tokenizer.end_with(dialect.ends)
    tokenizer.request_defaults()
    facts.tokenizer = {
        "kind": type(tokenizer.encoder.model).__name__,
        "class": str(tokenizer.config.get("tokenizer_class") or "?"),
        "tokens": tokenizer.vocab_size,
        "begins a text": None if tokenizer.bos_id is None else tokenizer.spell(tokenizer.bos_id)[0],
        "adds it": tokenizer.bos_id is not None and tokenizer.bos_id in ids[:1],
        "ends a text": [tokenizer.spell(token)[0] for token in tokenizer.eos_ids],
    }
    if not tokenizer.eos_ids:
        facts.notes.append("no end-of-sequence id is defined: every response ends at its token limit")
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        facts.notes.append(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}: the rest is refused")
    facts.chat = {
        "template": template is not None,
        "tool_call_parser": dialect.call_format,
        "reasoning_parser": dialect.reasoning,
    }
    if template is None:
        facts.notes.append("there is no chat template: chats need --chat-template")


def _tried(facts: ModelFacts, make: Callable[[], T]) -> T | None:
    try:
        return make()
    except ConfigError as error:
        facts.problems.append(str(error))
        return None


@contextmanager
def _collected(notes: list[str]) -> Iterator[None]:
    """Append the warnings logged within the block to `notes`."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    collector, loggers = Collector(logging.WARNING), [logging.getLogger(name) for name in LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(collector)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(collector)
            logger.propagate = propagate
