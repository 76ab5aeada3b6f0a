"""Time from a JSON schema to its automaton, as a request waits for it: in another process, forked for each, one at a time.

    python -m benchmarks.parts.grammar_compile --schemas FOLDER

FOLDER holds schemas, *.json at any depth; without one, a few of our own are compiled again and again under other names. Refused
schemas count by keyword; they have no time. The first schemas start the compiler and are not measured.
"""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, UsageError, check, run_benchmark
from blinkpy.dpu.grammar.grammar_compiler import GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.queues.byte_automaton import ByteAutomaton

TARGET_MS = 50.0
COMPILE_S = 10.0
WARM = 5
MOST_REASONS = 20
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
PERSON = {"type": "object", "properties": {"name": TEXT, "email": {"type": "string", "format": "email"}}, "required": ["name"]}
OWN: list[tuple[dict[str, Any], str]] = [  # with a document that each allows
    ({"enum": ["positive", "negative", "neutral"]}, '"neutral"'),
    (PERSON, '{"name": "Ada", "email": "ada@example.org"}'),
    ({"type": "array", "items": PERSON, "minItems": 1}, '[{"name": "Ada"}]'),
    (
        {
            "type": "object",
            "properties": {
                "date": {"type": "string", "format": "date"},
                "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            },
            "required": ["date", "lines"],
            "$defs": {
                "line": {
                    "type": "object",
                    "properties": {"what": TEXT, "count": COUNT, "price": {"type": "number", "minimum": 0}},
                }
            },
        },
        '{"date": "2024-02-29", "lines": [{"what": "tea", "count": 2, "price": 3.5}]}',
    ),
    ({"type": "object", "additionalProperties": {"anyOf": [TEXT, COUNT, {"type": "null"}]}}, '{"a": 1, "b": null}'),
]


def schemas(folder: str, most: int) -> list[tuple[Any, str]]:
    """(schema, a document that it allows, or "") in random order. most: of them."""
    if not folder:
        return [({"title": f"{i}"} | OWN[i % len(OWN)][0], OWN[i % len(OWN)][1]) for i in range(most)]
    found = []
    for path in sorted(Path(folder).rglob("*.json")):
        try:
            found.append((json.loads(path.read_text()), ""))
        except ValueError:
            continue
    if not found:
        raise UsageError(f"there are no schemas in {folder}")
    random.Random(1).shuffle(found)
    return found[:most]


async def measure(run: Run, work: list[tuple[Any, str]]) -> tuple[list[float], list[ByteAutomaton], Counter[str]]:
    """Milliseconds and automata of the accepted ones, refusals by reason."""
    compiler = GrammarCompiler(COMPILE_S, 1 << 20)
    times, automata, refused = [], [], Counter[str]()
    try:
        for number in range(WARM):
            await compiler.automaton({"choice": [f"{number}"]})
        for number, (schema, document) in enumerate(work):
            run.progress("schemas", number, len(work))
            start = time.perf_counter()
            try:
                automaton = await compiler.automaton({"schema": schema})
            except GrammarError as error:
                large = (
                    isinstance(error, GrammarTooLargeError) or "too many states" in error.message or "too long" in error.message
                )
                refused[error.keyword or ("size" if large else "other")] += 1
                continue
            times.append((time.perf_counter() - start) * 1e3)
            automata.append(automaton)
            check(not document or automaton.accepts(document.encode()), "a document is refused that the schema allows")
    finally:
        compiler.close()
    return times, automata, refused


def grammar_compile(run: Run) -> None:
    work = schemas(run.options.schemas, run.options.most)
    times, automata, refused = asyncio.run(measure(run, work))
    latency = describe(times, "ms", percentiles=(50.0, 90.0, 95.0, 99.0), tail=1)
    run.target(
        "95th percentile of the time to compile a schema",
        latency["p95"]["value"] if "p95" in latency else max(times),
        TARGET_MS,
        "ms",
    )
    run.write(
        __doc__,
        {
            "schemas": len(work),
            "accepted": len(times),
            "refused": dict(refused.most_common(MOST_REASONS)),
            "compile": latency,
            "states": describe([automaton.states for automaton in automata], "states", percentiles=(50.0, 95.0, 99.0), tail=1),
            "size": describe(
                [len(automaton.words()) * 4 for automaton in automata], "bytes", percentiles=(50.0, 95.0, 99.0), tail=1
            ),
        },
    )


if __name__ == "__main__":
    run_benchmark(
        "parts.grammar_compile",
        "Time from a JSON schema to its automaton.",
        grammar_compile,
        schemas=Flag("", "folder of schemas"),
        most=Flag(2000, "schemas to compile", 40),
    )
