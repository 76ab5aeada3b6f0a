"""Random JSON schemas, and outputs of random legal tokens, judged by an independent validator. `make
fuzz-schemas` runs it.

Each schema is compiled to an automaton. Tokens of the demonstration model's vocabulary are drawn at
random, with the mask of the CPU engine and the state transitions of the loop. A share of the schemas goes
through the whole engine, with random weights. A complete output must be valid according to the package
jsonschema; an output cut by max_tokens must be the beginning of a valid one. Three more outputs of each schema
have the lowest, the highest or a random legal token at each place. Their max_tokens is at least the bytes of the
shortest output, so each must be complete. Of each schema with bounds everywhere (--bounded), the bytes of three
outputs without max_tokens are compared with the bound in docs/structured-output.md. To repeat one schema:

    python tools/fuzz_schemas.py --seed SEED --first NUMBER --count 1
"""

import multiprocessing
import os
import secrets
from collections import Counter
from functools import cache
from itertools import chain
from typing import Any

from support.schema_storm import InvalidOutputError, TokenWalk, draw, engine_outputs, walk_outputs
from support.stated_bounds import bounded_outputs

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy import LLM
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.sizing import read_token_bytes
from blinkpy.models.weights.model_folder import DEMO_FOLDER

CHUNK = 50  # schemas of one job
SAID = 100  # jobs between two lines about it
SAMPLES = 2  # outputs of each
ENGINE_BATCH, ENGINE_TOKENS = 24, 120
ENGINE_OPTIONS: dict[str, Any] = {"slots": 12, "grammar_slots": 4, "max_model_len": 256, "check_integrity": "always"}


@cache
def walk() -> TokenWalk:
    tokenizer = Tokenizer(DEMO_FOLDER)
    tokens = read_token_bytes(DEMO_FOLDER, tokenizer.vocab_size)
    assert tokens is not None
    return TokenWalk(tokens, tokenizer.eos_ids[0])


def chunk(job: tuple[int, int, int]) -> tuple[Counter[str], list[str]]:
    """Counts and faults of a range of schemas. job: seed, first number, number after the last."""
    seed, at, last = job
    counts, faults = Counter[str](), list[str]()
    while at < last:
        try:
            for _, found in walk_outputs(walk(), seed, range(at, last), SAMPLES):
                counts += found
                at += 1
        except Exception as error:  # whatever it is, the rest is tried
            faults.append(f"schema {at}: {type(error).__name__}: {error}")
            at += 1
    return counts, faults


def bounded(job: tuple[int, int, int]) -> tuple[Counter[str], list[str]]:
    """As chunk, for bounded schemas."""
    seed, first, last = job
    counts, faults = Counter[str](), list[str]()
    for number in range(first, last):
        try:
            counts += bounded_outputs(seed, number)
        except Exception as error:  # whatever it is, the rest is tried
            faults.append(f"bounded schema {number}: {type(error).__name__}: {error}")
    return counts, faults


def jobs_of(seed: int, first: int, count: int) -> list[tuple[int, int, int]]:
    return [(seed, at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]


def engine(seed: int, numbers: list[int], run: Run) -> tuple[Counter[str], list[str]]:
    """Counts and faults of schemas through the whole engine."""
    counts, faults = Counter[str](), list[str]()
    if not numbers:
        return counts, faults
    with LLM("demo", device="cpu", load_format="dummy", dtype="float32", **ENGINE_OPTIONS) as llm:
        for first in range(0, len(numbers), ENGINE_BATCH):
            run.progress("schemas through the engine", first, len(numbers))
            try:
                counts += engine_outputs(llm, seed, [draw(seed, i) for i in numbers[first : first + ENGINE_BATCH]], ENGINE_TOKENS)
            except InvalidOutputError as error:
                faults.append(f"engine: {error}")
    return counts, faults


def fuzz_schemas(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"seed {options.seed}", flush=True)
    last = options.first + options.count
    counts, faults = Counter[str](), list[str]()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        several = pool.imap_unordered(chunk, jobs_of(options.seed, options.first, options.count))
        further = pool.imap_unordered(bounded, jobs_of(options.seed, options.first, options.bounded))
        for number, (found, wrong) in enumerate(chain(several, further)):
            counts += found
            faults += wrong
            for fault in wrong:
                print(fault[:2000], flush=True)
            run.progress("schemas", number * CHUNK, options.count + options.bounded)
            if number % SAID == 0:
                print(f"{number * CHUNK:,} of {options.count + options.bounded:,} schemas, {len(faults)} faults", flush=True)
    numbers = list(range(options.first, last, options.engine_every)) if options.engine_every else []
    found, wrong = engine(options.seed, numbers, run)
    counts += found
    faults += wrong
    for fault in wrong:
        print(fault[:2000], flush=True)
    check(not faults, f"{len(faults)} faults")
    check(counts["ended"] > 0 or not options.count, "no output ended by itself")
    refused = {name.removeprefix("refused: "): n for name, n in counts.items() if name.startswith("refused: ")}
    run.write(__doc__, {
        "schemas": options.count, "refused": refused, "outputs that ended": counts["ended"],
        "outputs cut by max_tokens": counts["cut"], "outputs that had to end": counts["closed"],
        "outputs of the engine that ended": counts["engine ended"], "of the engine cut by max_tokens": counts["engine cut"],
        "invalid": len(faults), "bounded schemas": options.bounded, "bounded schemas refused": counts["bounded: refused"],
        "outputs of bounded schemas, by 3 samplers": counts["bounded: ended"], "their bytes": counts["bounded: bytes"],
        "the most bytes that the docs state for them": counts["bounded: stated bytes"],
    })  # fmt: skip
    total = counts["ended"] + counts["cut"] + counts["closed"] + counts["engine ended"] + counts["engine cut"]
    print(f"{options.count:,} schemas, {sum(refused.values()):,} of them refused; {total:,} outputs, none invalid")
    print(f"{options.bounded:,} bounded schemas; {counts['bounded: ended']:,} outputs within the stated bytes")


if __name__ == "__main__":
    run_benchmark(
        "tools.fuzz_schemas",
        "Random JSON schemas and outputs, judged by an independent validator.",
        fuzz_schemas,
        count=Flag(100_000, "schemas", 200),
        bounded=Flag(3000, "schemas with bounds everywhere", 60),
        first=Flag(0, "number of the first one"),
        seed=Flag(0, "of all; 0: a random one"),
        jobs=Flag(max(1, (os.cpu_count() or 1) - 1), "processes"),
        engine_every=Flag(50, "one schema of each N goes through the whole engine, too; 0: none", 20),
    )
