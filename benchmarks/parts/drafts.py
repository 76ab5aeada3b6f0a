"""Tokens per second with drafts, against the same engine without them.

    python -m benchmarks.parts.drafts --shape llama-3-8b --streams 1 8 64 256 --before OLD --after NEW

Two engines with random weights run in this process, one after another. A client sends all requests of a workload together
through the real queues. On a GPU, a kernel after sampling replaces each sampled token by that of a given text. So a step has its
full cost, and drafts are accepted as often as for a model that writes these texts. TPOT of a request: the time from its first
token to its last one, by their number less one.

Workloads: *edits*, where prompts are source files and outputs their next version, with a change in each output; *quotations*,
passages of a prompt in another order, each followed by fresh text; *prose*, text that continues a prompt. Source files come from
two folders, e.g. two releases of a package. Tokens are those of a byte-pair encoding that is trained on all texts of the run.
"""

import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from support.engine_serving import serving  # noqa: E402

from benchmarks.common.distribution import rounded  # noqa: E402
from benchmarks.common.harness import Flag, Run, UsageError, check, run_benchmark, table  # noqa: E402
from benchmarks.common.nvml import EnergyMeter  # noqa: E402
from benchmarks.common.random_engines import measured_on, model_options, one_by_one  # noqa: E402
from blinkpy.config import Config  # noqa: E402
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair  # noqa: E402
from blinkpy.engine.engine import Engine, make_engine  # noqa: E402
from blinkpy.queues.request_parameters import RequestParameters  # noqa: E402
from blinkpy.queues.words import COUNTER, FINISH_LENGTH, FINISH_MASK, HAS_TOKEN  # noqa: E402

BOOK = Path(__file__).parents[1] / "data" / "sense_and_sensibility.txt"
VOCABULARY = 16_384
LONGEST_S = 300.0
QUOTED, FRESH = 48, 16  # tokens of a quotation, and of the text after it
LEAST = 8  # requests of a figure; with fewer streams, several rounds


class Text(NamedTuple):
    """One request: the tokens of its prompt and of its output."""

    prompt: list[int]
    output: list[int]


def pairs_of_files(before: Path, after: Path) -> list[tuple[str, str]]:
    """Python files of two folders that differ: (old text, new text)."""
    found = []
    for path in sorted(after.rglob("*.py")):
        old = before / path.relative_to(after)
        if old.is_file() and (texts := (old.read_text(errors="replace"), path.read_text(errors="replace")))[0] != texts[1]:
            found.append(texts)
    if not found:
        raise UsageError(f"{before} and {after} have no Python files of the same name with different texts")
    return found


def edited(text: str, draw: random.Random) -> str:
    """A source file in which one line in twenty is removed, repeated or replaced, and the first line is repeated."""
    lines = text.splitlines(keepends=True)
    kept = lines[:1]
    for line in lines:
        change = draw.randrange(60)
        kept += [] if change == 0 else [line, line] if change == 1 else [draw.choice(lines)] if change == 2 else [line]
    return "".join(kept)


def workloads(run: Run, count: int, prompt: int, new: int) -> dict[str, list[Text]]:
    """`count` requests of each workload, with prompts and outputs of these tokens. Raises UsageError."""
    draw, options = random.Random(1), run.options
    if options.before and options.after:
        files = pairs_of_files(Path(options.before), Path(options.after))
    else:
        sources = sorted(Path(__file__).parents[2].joinpath("blinkpy").rglob("*.py"))[: 20 if options.smoke else None]
        files = [(text := path.read_text(), edited(text, draw)) for path in sources]
    book = BOOK.read_text()
    encoding = tokenizers.ByteLevelBPETokenizer()
    encoding.train_from_iterator([book, *(text for both in files for text in both)], VOCABULARY, show_progress=False)
    prose = encoding.encode(book).ids
    encoded = [
        (encoding.encode(old[: 8 * prompt]).ids[:prompt], encoding.encode(after[: 8 * new]).ids[:new]) for old, after in files
    ]
    edits = [Text(old, after) for old, after in encoded if len(old) == prompt and len(after) == new and after != old[:new]]
    check(bool(edits), f"no source file of {prompt} tokens has a change in its first {new} tokens")
    draw.shuffle(edits)
    starts = [draw.randrange(len(prose) - prompt - new) for _ in range(count)]
    continued = [Text(prose[at : at + prompt], prose[at + prompt : at + prompt + new]) for at in starts]
    quoted = []
    for one in continued:
        output = list[int]()
        while len(output) < new:
            at, fresh = draw.randrange(prompt - QUOTED), draw.randrange(len(prose) - FRESH)
            output += one.prompt[at : at + QUOTED] + prose[fresh : fresh + FRESH]
        quoted.append(Text(one.prompt, output[:new]))
    return {"edits": [edits[i % len(edits)] for i in range(count)], "quotations": quoted, "prose": continued}


class Round(NamedTuple):
    """Figures of requests that were sent together. tpot: ms, of each; seconds: from the first token on; joules: of the GPU."""

    tpot: list[float]
    tokens: int
    seconds: float
    joules: float | None


def serve_round(pair: QueuePair, texts: list[Text], first: int) -> Round:
    """Send requests together, and wait for their ends."""
    began, last, count = dict[InFlightRequest, float](), dict[InFlightRequest, float](), dict[InFlightRequest, int]()
    with EnergyMeter() as meter:
        start = time.perf_counter()
        sent = [
            pair.submit(
                np.array(text.prompt, np.int32), RequestParameters(max_tokens=len(text.output), temperature=0.0, seed=first + i)
            )
            for i, text in enumerate(texts)
        ]
        left, beat = len(sent), start
        while left:
            now = time.perf_counter()
            for request, _, flags in pair.poll():
                if flags & HAS_TOKEN:
                    began.setdefault(request, now)
                    last[request], count[request] = now, count.get(request, 0) + 1
                if flags & FINISH_MASK:
                    check(flags & FINISH_MASK == FINISH_LENGTH, "a request did not end by its length")
                    left -= 1
            check(now - start < LONGEST_S, f"requests did not end within {LONGEST_S:g} s")
            if now > beat:
                pair.heartbeat()
                beat = now + 0.2
        end = time.perf_counter()
        joules = None if meter.missing else meter.joules(start, end)
    tpot = [1e3 * (last[one] - began[one]) / (count[one] - 1) for one in sent]
    return Round(tpot, sum(count.values()), end - min(began.values()), joules)


def serve(engine: Engine, pair: QueuePair, texts: list[Text], first: int, streams: int) -> dict[str, Any]:
    """The figures of requests that are sent in rounds of `streams`. first: seed of the first one, which is its text's number."""
    words = engine.views.engine
    before = {name: int(words[COUNTER[name]]) for name in ("draft_tokens", "draft_tokens_accepted")}
    tpot, tokens, seconds, joules = list[float](), 0, 0.0, list[float | None]()
    for at in range(0, len(texts), streams):
        figures = serve_round(pair, texts[at : at + streams], first + at)
        tpot, tokens, seconds = tpot + figures.tpot, tokens + figures.tokens, seconds + figures.seconds
        joules.append(figures.joules)
    drafts, right = (int(words[COUNTER[name]]) - before[name] for name in before)
    return {
        "tpot_ms": rounded(float(np.mean(tpot))),
        "tokens_per_s": rounded(tokens / seconds),
        "drafts": drafts,
        "right": right,
        "joules_per_token": None if None in joules else rounded(sum(each or 0.0 for each in joules) / tokens),
    }


def measure(config: Config, texts: dict[str, list[Text]], run: Run) -> dict[str, dict[int, dict[str, Any]]]:
    """The figures of one engine, by workload and streams. Raises ConfigError."""
    device = None
    if not run.options.smoke:
        from benchmarks.common.forced_outputs import forcing
        from blinkpy.engine.devices.cuda_device import CudaDevice

        outputs = torch.tensor([text.output for some in texts.values() for text in some], dtype=torch.int32, device="cuda")
        device = CudaDevice(sample=forcing(outputs))
    engine = make_engine(config.with_options({"name": f"drafts-{secrets.token_hex(6)}"}), device=device)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in texts}
    with serving(engine) as pair:
        first, done, runs = 0, 0, len(texts) * len(run.options.streams)
        for name, some in texts.items():
            serve(engine, pair, some[:1], first, 1)  # the first requests of an engine are slower
            for streams in run.options.streams:
                run.progress(f"{config.scheduler.speculative}: {name}, {streams} streams", done, runs)
                found[name][streams] = serve(engine, pair, some[: max(streams, LEAST)], first, streams)
                done += 1
            first += len(some)
    return found


def sizes_of(options: Any, requests: int) -> dict[str, Any]:
    """The sizes of engines that take this number of requests at the same time."""
    sizes = {"max_model_len": options.prompt + options.new, "slots": 2 * options.rows, "max_num_seqs": options.rows}
    sizes |= {"prompt_arena_tokens": 2 * requests * options.prompt, "grammar_slots": 0}
    return sizes | {"enable_prefix_caching": False}


def compared(off: dict[str, Any], on: dict[str, Any]) -> list[str]:
    """Cells of a table: TPOT of an engine, that with drafts, and their ratio."""
    return [f"{off['tpot_ms']:.3g}", f"{on['tpot_ms']:.3g}", f"{off['tpot_ms'] / on['tpot_ms']:.2f}x"]


def benchmark(run: Run) -> None:
    options = run.options
    texts = workloads(run, max(LEAST, *options.streams), options.prompt, options.new)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            texts = {
                name: [Text([token % 4096 for token in one.prompt], one.output) for one in some] for name, some in texts.items()
            }
        sizes = sizes_of(options, max(LEAST, *options.streams))
        model = {**model_options(folder, run), "quantization": options.quantization}
        config = Config().with_options({**model, **sizes})
        engines = dict(one_by_one(("off", "ngram"), lambda kind: measure(config.with_options({"speculative": kind}), texts, run)))
    rows = []
    for name in texts:
        for streams in options.streams:
            off, on = (engines[kind][name][streams] for kind in ("off", "ngram"))
            share = f"{on['right'] / on['drafts']:.0%}" if on["drafts"] else "none"
            rows.append([name, str(streams), *compared(off, on), share])
    run.write(__doc__, {**measured_on(run), "engines": engines})
    print(table(("workload", "streams", "TPOT off, ms", "TPOT with drafts, ms", "faster", "accepted drafts"), rows))


if __name__ == "__main__":
    run_benchmark(
        "parts.drafts",
        "Tokens per second with drafts from a request's own tokens, against none.",
        benchmark,
        shape=Flag("llama-3-8b", "of the model"),
        quantization=Flag("auto", "of the engine"),
        streams=Flag((1, 8, 64, 256), "requests at once", (1, 2)),
        rows=Flag(512, "of the largest step of decode rows", 8),
        prompt=Flag(1024, "tokens of a prompt", 64),
        new=Flag(512, "tokens of an output", 24),
        before=Flag("", "folder of source files"),
        after=Flag("", "folder of their next version"),
    )
