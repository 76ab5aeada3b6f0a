"""Time from a JSON schema to its automaton, and from the automaton to the end of a request of one token.

    python -m benchmarks.parts.grammar_compile --schemas FOLDER

Each schema is compiled as for a request: in a process forked for it, one at a time. The request goes through a real queue pair
to the null engine, which has its own process.

FOLDER holds schemas, *.json at any depth. Without FOLDER, a few built-in schemas are compiled repeatedly under other names.
Refused schemas are counted by keyword and have no time. The first schemas start the compiler and are not measured. Each
automaton is sent two
times: the second request finds it in the engine's memory. `plain` is the same request without a grammar. While a request is
measured, nothing else runs. `tools` compiles lists of 20 strict tools. Each has 10 fields: texts with a most length,
integers, booleans, lists and enums. The format is `hermes`, names and lengths are new, and a pause comes before each list.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, UsageError, check, run_benchmark
from blinkpy.dpu.admission.gate import Asker
from blinkpy.dpu.grammar.compile_grammar import Grammar
from blinkpy.dpu.grammar.grammar_compiler import GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.tools.call_grammar import forced_calls
from blinkpy.dpu.tools.hermes_calls import FORMATS
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_ERROR, FINISH_MASK, STATE_READY

TARGET_MS = 50.0
COMPILE_S, COMPILE_BYTES = 10.0, 128 << 20
ASKER = Asker("benchmark")
WARM = 5
MOST_REASONS = 20
TOOLS, FIELDS, PAUSE_S = 20, 10, 0.2
READY_S, ANSWER_S, BEAT_S, POLL_S = 300.0, 20.0, 0.5, 0.01
PROMPT = np.arange(16, dtype=np.int32)
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
    """(schema, a valid document or "") in random order. most: maximum number."""
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


class Tool(NamedTuple):
    """A function, as the grammars of calls take it."""

    name: str
    parameters: dict[str, Any]
    strict: bool = True
    where: str = "tools"


def tool_list(number: int) -> Grammar:
    """Calls of TOOLS tools of FIELDS fields. number: it gives the names and lengths."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "array", "items": {"type": "string"}},
        {"enum": ["low", "medium", "high"]},
    ]  # fmt: skip
    tools = []
    for i in range(TOOLS):
        fields = {f"field_{number}_{i}_{k}": dict(kinds[k % len(kinds)]) for k in range(FIELDS)}
        for k, field in enumerate(fields.values()):
            if field == kinds[0]:
                field["maxLength"] = 100 + number + i + k
        schema = {"type": "object", "properties": fields, "required": list(fields)[::2], "additionalProperties": False}
        tools.append(Tool(f"tool_{number}_{i}", schema))
    return forced_calls(FORMATS[0], tools, True).grammar


async def measure_tools(run: Run) -> tuple[list[float], list[ByteAutomaton]]:
    """Milliseconds and automata of lists of tools."""
    compiler = GrammarCompiler(COMPILE_S, COMPILE_BYTES, 1 << 20)
    times, automata = [], []
    try:
        await compiler.automaton({"choice": ["begin"]}, ASKER)
        for number in range(run.options.tool_lists):
            run.progress("lists of tools", number, run.options.tool_lists)
            await asyncio.sleep(PAUSE_S)
            grammar = tool_list(number)
            start = time.perf_counter()
            automata.append(await compiler.automaton(grammar, ASKER))
            times.append((time.perf_counter() - start) * 1e3)
    finally:
        compiler.close()
    return times, automata


async def measure(run: Run, work: list[tuple[Any, str]]) -> tuple[list[float], list[ByteAutomaton], Counter[str]]:
    """Milliseconds and automata of the accepted schemas, and the refusals by reason."""
    compiler = GrammarCompiler(COMPILE_S, COMPILE_BYTES, 1 << 20)
    times, automata, refused = [], [], Counter[str]()
    try:
        for number in range(WARM):
            await compiler.automaton({"choice": [f"{number}"]}, ASKER)
        for number, (schema, document) in enumerate(work):
            run.progress("schemas", number, len(work))
            start = time.perf_counter()
            try:
                automaton = await compiler.automaton({"schema": schema}, ASKER)
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


class Sent(NamedTuple):
    """One request: microseconds of submit(), milliseconds to its end, and the written bytes of its automaton."""

    submit_us: float
    end_ms: float
    written: int


def send(pair: QueuePair, grammar: ByteAutomaton | None) -> Sent:
    """Send a request of one token, alone in the engine."""
    start = time.perf_counter()
    request = pair.submit(PROMPT, RequestParameters(max_tokens=1), grammar=grammar)
    submitted = time.perf_counter()
    while pair.in_flight:
        for _, _, flags in pair.poll():
            check(flags & FINISH_MASK != FINISH_ERROR, "the engine had no legal token")
        check(time.perf_counter() - start < ANSWER_S, "no answer came")
    return Sent((submitted - start) * 1e6, (time.perf_counter() - start) * 1e3, sum(request.written))


def install(run: Run, automata: list[ByteAutomaton]) -> dict[str, list[Sent]]:
    """Send each automaton to a null engine: a request without it, the first one with it, and the second one."""
    name = f"serve-benchmark-{os.getpid()}"
    command = [sys.executable, "-m", "blinkpy", "engine", "demo", "--device", "null", "--name", name, "--slots", "4"]
    engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found: dict[str, list[Sent]] = {"plain": [], "first": [], "again": []}
    try:
        pair = QueuePair(attach_segment(name, 0, READY_S), engine_timeout_s=ANSWER_S)
        pair.attach(READY_S)
        while pair.transport.read_engine_state() != STATE_READY:
            time.sleep(POLL_S)
        beat = 0.0
        for number, automaton in enumerate(automata):
            run.progress("requests", number, len(automata))
            if time.monotonic() - beat > BEAT_S:
                pair.heartbeat()
                beat = time.monotonic()
            for kind in found:
                found[kind].append(send(pair, None if kind == "plain" else automaton))
            check(found["again"][-1].written == 0, "an automaton was written twice")
        pair.close()
    finally:
        engine.terminate()
        engine.wait(ANSWER_S)
    return found


def grammar_compile(run: Run) -> None:
    work = schemas(run.options.schemas, run.options.most)
    times, automata, refused = asyncio.run(measure(run, work))
    latency = describe(times, "ms", percentiles=(50.0, 90.0, 95.0, 99.0), tail=1)
    tool_times, tool_automata = asyncio.run(measure_tools(run))
    tools = describe(tool_times, "ms", percentiles=(50.0, 90.0, 95.0), tail=1)
    run.target(
        f"95th percentile of the time to compile {TOOLS} strict tools of {FIELDS} fields",
        tools["p95"]["value"] if "p95" in tools else tools["max"],
        TARGET_MS,
        "ms",
    )
    sent = install(run, automata)
    whole = describe([a + b.end_ms for a, b in zip(times, sent["first"], strict=True)], "ms", percentiles=(50.0, 95.0), tail=1)
    run.target(
        "95th percentile of the time to compile a schema, and to the end of its first request",
        whole["p95"]["value"] if "p95" in whole else whole["max"],
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
            "compile_and_install": whole,
            "tools": {
                "compile": tools,
                "states": tool_automata[-1].states,
                "bytes": len(tool_automata[-1].words()) * 4,
            },
            "request": {
                kind: {
                    "submit": describe([one.submit_us for one in requests], "us", percentiles=(50.0, 95.0), tail=1),
                    "end": describe([one.end_ms for one in requests], "ms", percentiles=(50.0, 95.0), tail=1),
                    "written": sum(one.written for one in requests) / len(requests),
                }
                for kind, requests in sent.items()
            },
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
        tool_lists=Flag(100, "lists of tools to compile", 3),
    )
