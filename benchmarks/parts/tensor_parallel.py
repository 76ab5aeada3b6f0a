"""Time per output token of one model on one GPU and on several (--tensor-parallel-size).

    python -m benchmarks.parts.tensor_parallel --shape llama-3-8b --ranks 1 2 --streams 1 8 64

Engines with random weights run in this process, one after another. A client sends all requests together through the real
queues. TPOT of a request: the time from its first token to its last one, by their number less one.
"""

import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from support.engine_serving import serving  # noqa: E402

from benchmarks.common.harness import Flag, Run, run_benchmark, table  # noqa: E402
from benchmarks.common.random_engines import measured_on, model_options, one_by_one  # noqa: E402
from benchmarks.parts.drafts import Text, serve  # noqa: E402
from blinkpy.config import Config  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402

VOCABULARY = 4096  # of the prompts


def measure(config: Config, texts: list[Text], run: Run) -> dict[int, dict[str, Any]]:
    """The figures of one engine by streams. Raises ConfigError."""
    engine = make_engine(config.with_options({"name": f"ranks-{secrets.token_hex(6)}"}))
    found = {}
    with serving(engine) as pair:
        serve(engine, pair, texts[:1], 0, 1)  # the first requests of an engine are slower
        for done, streams in enumerate(run.options.streams):
            run.progress(f"{config.engine.tensor_parallel_size} GPUs, {streams} streams", done, len(run.options.streams))
            figures = serve(engine, pair, texts[:streams], 0, streams)
            found[streams] = {name: figures[name] for name in ("tpot_ms", "tokens_per_s")}
    return found


def benchmark(run: Run) -> None:
    options = run.options
    draw = np.random.default_rng(1)
    prompts = draw.integers(0, VOCABULARY, (max(options.streams), options.prompt))
    texts = [Text(prompt.tolist(), [0] * options.new) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_model_len": options.prompt + options.new, "enable_prefix_caching": False, "grammar_slots": 0}
        config = Config().with_options({**model_options(folder, run), "quantization": options.quantization, **sizes})
        engines = dict(
            one_by_one(options.ranks, lambda ranks: measure(config.with_options({"tensor_parallel_size": ranks}), texts, run))
        )
    first = engines[options.ranks[0]]
    rows = [
        [str(ranks), str(streams), f"{one['tpot_ms']:.3g}", f"{first[streams]['tpot_ms'] / one['tpot_ms']:.2f}x"]
        for ranks, found in engines.items()
        for streams, one in found.items()
    ]
    run.write(__doc__, {**measured_on(run), "engines": engines})
    print(table(("GPUs", "streams", "TPOT, ms", "faster"), rows))


if __name__ == "__main__":
    run_benchmark(
        "parts.tensor_parallel",
        "Time per output token on one GPU and on several.",
        benchmark,
        shape=Flag("llama-3-8b", "of the model"),
        quantization=Flag("auto", "of the engine"),
        ranks=Flag((1, 2), "GPUs of an engine", (1,)),
        streams=Flag((1, 8, 64), "requests at once", (1, 2)),
        prompt=Flag(512, "tokens of a prompt", 64),
        new=Flag(256, "tokens of an output", 24),
    )
