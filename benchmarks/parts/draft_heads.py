"""Tokens per second with drafts of a layer or a head, against the same engine without them.

    python -m benchmarks.parts.draft_heads --shape llama-3-8b --kind eagle3 --rates 0.6 0.75 --streams 1 8 32 128

Engines with random weights run in this process, one after another. A client sends all requests of a figure together through the
real queues. Random weights draft no correct token. So on a GPU, a kernel after sampling replaces the sampled token by the draft,
with the given probability, and otherwise by another token. A step has its full cost. TPOT of a request: the time from its first
token to its last one, by their number less one.
"""

import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from support.engine_serving import serving  # noqa: E402

from benchmarks.common.harness import Flag, Run, run_benchmark, table  # noqa: E402
from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from benchmarks.common.random_engines import measured_on, model_options, one_by_one  # noqa: E402
from benchmarks.parts.drafts import Text, compared, serve, sizes_of  # noqa: E402
from blinkpy.config import Config  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402
from blinkpy.models.weights.model_folder import DEMO_FOLDER  # noqa: E402

VOCABULARY = 4096  # of the prompts
DRAFTED_TOKENS = 32_000  # rows of a head's output
WIDTHS = (
    *("hidden_size", "intermediate_size", "vocab_size", "rope_theta"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def write_head(folder: Path, model: dict[str, Any]) -> str:
    """Write the config.json of an EAGLE-3 head of a model's widths; the folder."""
    widths = {name: model[name] for name in WIDTHS if name in model}
    rows = min(DRAFTED_TOKENS, model["vocab_size"])
    head: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": rows}
    layers = model["num_hidden_layers"]
    head["eagle_aux_hidden_state_layer_ids"] = [1, layers // 2, layers - 1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(widths | head))
    return str(folder)


def measure(config: Config, texts: dict[float, list[Text]], run: Run) -> dict[float, dict[int, dict[str, Any]]]:
    """The figures of one engine, by rate and streams. Raises ConfigError."""
    device, kind = None, config.scheduler.speculative
    if not run.options.smoke:
        from benchmarks.common.forced_outputs import accepting
        from blinkpy.engine.devices.cuda_device import CudaDevice

        rates = torch.tensor([rate for rate, some in texts.items() for _ in some], dtype=torch.float32, device="cuda")
        device = CudaDevice(sample=accepting(rates))
    engine = make_engine(config.with_options({"name": f"heads-{secrets.token_hex(6)}"}), device=device)
    found: dict[float, dict[int, dict[str, Any]]] = {rate: {} for rate in texts}
    with serving(engine) as pair:
        first, done, runs = 0, 0, len(texts) * len(run.options.streams)
        for rate, some in texts.items():
            serve(engine, pair, some[:1], first, 1)  # the first requests of an engine are slower
            for streams in run.options.streams:
                run.progress(f"{kind}: rate {rate:g}, {streams} streams", done, runs)
                figures = serve(engine, pair, some[:streams], first, streams)
                produced = streams * run.options.new
                found[rate][streams] = figures | {"tokens_per_step": round(produced / max(1, produced - figures["right"]), 2)}
                done += 1
            first += len(some)
    return found


def benchmark(run: Run) -> None:
    options, draw = run.options, np.random.default_rng(1)
    prompts = draw.integers(0, VOCABULARY, (max(options.streams), options.prompt)).tolist()
    texts = {rate: [Text(prompt, [0] * options.new) for prompt in prompts] for rate in options.rates}
    with tempfile.TemporaryDirectory() as folder:
        model = {**model_options(folder, run), "quantization": options.quantization, "load_format": "dummy"}
        config = Config().with_options({**model, **sizes_of(options, max(options.streams))})
        drafts: dict[str, Any] = {"speculative": options.kind, "speculative_tokens": options.drafts}
        if options.kind == "eagle3":
            served = json.loads((DEMO_FOLDER / "config.json").read_text()) if options.smoke else SHAPES[options.shape]
            drafts["speculative_model"] = write_head(Path(folder) / "head", served)
        kinds: dict[str, dict[str, Any]] = {"off": {}, options.kind: drafts}
        engines = dict(one_by_one(kinds, lambda kind: measure(config.with_options(kinds[kind]), texts, run)))
    rows = []
    for rate in options.rates:
        for streams in options.streams:
            off, on = (engines[kind][rate][streams] for kind in kinds)
            rows.append([f"{rate:g}", str(streams), f"{on['tokens_per_step']:.2f}", *compared(off, on)])
    run.write(__doc__, {**measured_on(run), "engines": engines})
    print(table(("rate", "streams", "tokens per step", "TPOT off, ms", "TPOT with drafts, ms", "faster"), rows))


if __name__ == "__main__":
    run_benchmark(
        "parts.draft_heads",
        "Tokens per second with drafts of a layer or a head, against none.",
        benchmark,
        shape=Flag("llama-3-8b", "of the model"),
        kind=Flag("eagle3", "of drafts: mtp or eagle3"),
        drafts=Flag(3, "most of a request in a step"),
        rates=Flag((0.6, 0.75), "probabilities that a draft after correct ones is correct", (0.75,)),
        quantization=Flag("auto", "of the engine"),
        streams=Flag((1, 8, 32, 128), "requests at once", (1, 2)),
        rows=Flag(512, "of the largest step of decode rows", 8),
        prompt=Flag(512, "tokens of a prompt", 64),
        new=Flag(256, "tokens of an output", 24),
    )
