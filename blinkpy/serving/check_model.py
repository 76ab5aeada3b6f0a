"""`blinkpy check-model`: a report about a model, without reading its weights."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blinkpy.config import Config
from blinkpy.models.gpu.gpu_memory_plan import gib
from blinkpy.models.weights.model_folder import resolve_model
from blinkpy.serving.model_facts import GPUS, ModelFacts, model_facts
from blinkpy.tool_options import CheckModelOptions


def as_json(facts: ModelFacts, **more: Any) -> str:
    """All facts as a JSON object. more: additional entries."""
    rows = {name: [one._asdict() for one in getattr(facts, name)] for name in ("gpus", "tried")}
    return json.dumps({**more, **vars(facts), **rows}, indent=1)


SERVER_OPTIONS = (
    "dtype", "quantization", "speculative_model", "max_model_len", "gpu_memory_utilization", "slots", "window_cache",
    "kv_cache_dtype", "tensor_parallel_size",
)  # fmt: skip


def run_check_model(options: CheckModelOptions) -> int:
    """Print the report, as text or JSON. Returns 1 if the model can't be served, else 0. Raises ConfigError
    if it does not exist.
    """
    folder = resolve_model(options.model, weights=False, tokenizer=False)
    local = options.model == "demo" or Path(options.model).expanduser().exists()
    hub_id = "" if local else options.model
    given = {name: getattr(options, name) for name in SERVER_OPTIONS}
    gpus = GPUS | ({f"{options.gpu_gib:g} GiB": int(options.gpu_gib * 2**30)} if options.gpu_gib else {})
    facts = model_facts(folder, Config().with_options(given), hub_id=hub_id, gpus=gpus)
    changed = {name: str(value) for name, value in given.items() if value != getattr(CheckModelOptions, name)}
    flags = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in changed.items()]
    command = "" if facts.problems else " ".join(["blinkpy serve", shlex.quote(options.model), *flags])
    if options.json:
        print(as_json(facts, model=options.model, supported=not facts.problems, command=command))
    else:
        print("\n".join(_page(options.model, facts, command)))
    return 1 if facts.problems else 0


def _page(model: str, facts: ModelFacts, command: str) -> Iterator[str]:
    yield f"{model}: {facts.model_class}, {'refused' if facts.problems else 'supported'}"
    yield from (f"  problem        {problem}" for problem in facts.problems)
    yield from (f"  note           {note}" for note in facts.notes)
    if facts.shape:
        yield from _model_lines(facts)
    if facts.tokenizer:
        found = facts.tokenizer
        begin = repr(found["begins a text"]) if found["adds it"] else "nothing"
        ends = ", ".join(map(repr, found["ends a text"])) or "nothing"
        yield f"tokenizer        {found['kind']}, {found['class']}, {found['tokens']:,} tokens"
        yield f"  before a text  {begin}; its end: {ends}"
    if facts.chat:
        has = "yes" if facts.chat["template"] else "no"
        calls, tags = facts.chat["tool_call_parser"], facts.chat["reasoning_parser"]
        yield f"chat template    {has}; tool calls: {calls}; reasoning: {tags}"
    if command:
        yield f"\n{command}"


def _model_lines(facts: ModelFacts) -> Iterator[str]:
    total = sum(facts.parameters.values())
    shape = ", ".join(f"{name} {value}" for name, value in facts.shape.items())
    yield f"config           {shape}, quantization {facts.quantization}"
    context = facts.context
    windows = f"; windows of {', '.join(map(str, context['windows']))}" if context["windows"] else ""
    yield f"context          {context['default']:,} tokens, at most {context['longest']:,}; rope: {context['rope']}{windows}"
    active = "" if facts.active_parameters == total else f", {facts.active_parameters:,} of them for a token"
    yield f"parameters       {total:,}{active}"
    for name, count in facts.parameters.items():
        yield f"  {name:15}{count:>18,}  {gib(facts.weight_bytes[name])}"
    yield f"weights          {gib(sum(facts.weight_bytes.values()))}"
    rings = f", and window rings, {facts.ring_bytes_per_slot / 2**20:,.2f} MiB a slot" if facts.ring_bytes_per_slot else ""
    if facts.state_bytes_per_slot:
        rings += f", and recurrent states, {facts.state_bytes_per_slot / 2**20:,.2f} MiB a slot"
    yield f"KV cache         {facts.cache_bytes_per_token / 1024:,.1f} KiB a token{rings}, {facts.cache_dtype}"
    for one in facts.gpus:
        fits = one.problem.split(" (")[0] or f"sequences up to {one.context:,} tokens, {one.cached:,} tokens in all"
        if facts.state_bytes_per_slot and not one.problem:
            fits += f", {one.slots} slots"
        yield f"  on {one.gpu:14}{fits}"
    if facts.tried:
        yield "tried            two layers at these widths on a GPU, compared with transformers:"
        yield from (f"  {run.text}" for run in facts.tried)
    else:
        yield "tried            no form of a model with these widths on a GPU"
