"""The kernels that the loop on the GPU runs beside and after each step: the parts of a turn. And their compiled code.

Each is one block. `turn` commits the step, plans the next one, tells the graph's conditional nodes which step graph that is and
whether there is one, and notes times for whoever measures. `tell` and `ahead` run while a step does: `tell` at its begin, with
what `turn` left to publish, `ahead` near its end. See blinkpy.engine.loop_graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
from numba import int64, types

from blinkpy.device.compile_cache import cache_folder
from blinkpy.device.cuda.kernel_compiler import KernelCode, compile_kernel
from blinkpy.device.portable import nanosleep, now_ns, register_cuda
from blinkpy.device.targets.graph_conditions import set_condition, wait_for_predecessors
from blinkpy.kernels.loop.loop_arguments import table_reader
from blinkpy.kv.state import COPIES_BEGUN, COPIES_DONE, DECODE_ROWS, DRAINED, POSITION, ROWS, STEADY, STOPPED
from blinkpy.queues.words import ENGINE_STATE, STATE_STOPPED
from blinkpy.scheduler.cycle import Phases, make_phases
from blinkpy.scheduler.phases.fast_path import fetch_ahead
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.policy_key import policy_digest

cuda = register_cuda()

LANES = 256
IDLE_SLEEP_NS = 500

# Words of the loop, int64, in GPU memory.
LOOP_BUDGET_NS = 0  # the loop ends by itself so long after its first turn; 0: never
LOOP_BEGAN_NS = 1  # clock of the first turn
LOOP_TURNS = 2
LOOP_TRACED = 3  # rows written to the trace
LOOP_RESULT = 4  # what ended the loop: STOPPED, DRAINED, or TIME_OVER
LOOP_AHEAD_BEGIN = 5  # clock of the last `ahead`
LOOP_AHEAD_END = 6
LOOP_COPY_GRAPH = 7  # branch of SWITCH that copies the state for the flight recorder
LOOP_COPY_AT = 8  # words recorded at which the next copy is due
LOOP_COPY_EVERY = 9  # words between two copies
LOOP_COPY_DUE = 10  # 1: before the next step
LOOP_COPIES = 11  # copies begun
LOOP_HELD = 12  # step graph that follows the copy
LOOP_TELL = 13  # 1: the last turn has not reported; `tell` does
LOOP_WORDS = 14
TIME_OVER = -100

# Columns of the trace, int64, one row for each turn that made a batch. Times are of the GPU's clock, ns.
TRACE_BEGIN = 0  # the step before is complete
TRACE_END = 1  # the turn's decision is made
TRACE_GRAPH = 2
TRACE_ROWS = 3
TRACE_AHEAD_BEGIN = 4  # of the turn's first half
TRACE_AHEAD_END = 5
TRACE_STEP_BEGIN = 6  # of the step that is complete, written by stamps; 0 without
TRACE_STEP_END = 7
TRACE_STEADY = 8  # 1: it may have taken the short way
TRACE_COLUMNS = 9

MOST_BUCKETS = 128
WORDS = types.Array(int64, 1, "C")
AHEAD_SIGNATURE = types.void(WORDS, WORDS)
TELL_SIGNATURE = types.void(WORDS, WORDS)
TURN_SIGNATURE = types.void(
    WORDS,
    types.Array(types.uint64, 1, "C"),
    WORDS,
    types.Array(int64, 2, "C"),
    types.uint64,
    types.uint64,
    int64,
)
STAMP_SIGNATURE = types.void(WORDS, types.Array(int64, 2, "C"), int64)
RESUME_SIGNATURE = types.void(types.Array(types.uint64, 1, "C"), WORDS, WORDS, types.uint64, int64)


class LoopCode(NamedTuple):
    """The compiled kernels of the loop."""

    ahead: KernelCode
    turn: KernelCode
    tell: KernelCode
    stamp: KernelCode
    resume: KernelCode


def ahead_kernel(phases: Phases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `ahead`. kind, words: of its table (see device_arguments). Arguments: the table, int64 [words], with
    what `turn` has behind it; the loop's words."""
    read, run, shared_words = table_reader(kind), phases.ahead, words + 2 * MOST_BUCKETS

    def ahead(table, loop):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(shared_words, int64), lane, lanes)
        clock = cuda.shared.array(1, int64)
        if lane == 0:
            clock[0] = now_ns()
        cuda.syncthreads()  # one time for all lanes: what they decide depends on it
        run(arguments.limits, arguments.queues, arguments.state, clock[0], lane, lanes)
        if lane == 0:
            loop[LOOP_AHEAD_BEGIN] = clock[0]
            loop[LOOP_AHEAD_END] = now_ns()

    return ahead


def tell_kernel(phases: Phases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `tell`, which reports for the turn before the step that it runs in: counters, gauges and the
    heartbeat go to the host's memory, and nobody waits for them. Arguments as of `ahead`."""
    read, report, shared_words = table_reader(kind), phases.report, words + 2 * MOST_BUCKETS

    def tell(table, loop):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        engine = read(table, cuda.shared.array(shared_words, int64), lane, lanes)
        due = loop[LOOP_TELL]
        cuda.syncthreads()
        if due != 0:
            report(engine.limits, engine.queues, engine.state, lane, lanes)
            if lane == 0:
                loop[LOOP_TELL] = 0
                ask_for_copy(loop, engine.state.recorder.cursor[POSITION])

    return tell


@cuda.jit(device=True)
def ask_for_copy(loop, position):
    """One lane, after a report: is a copy of the state due? position: words recorded."""
    if position >= loop[LOOP_COPY_AT]:
        loop[LOOP_COPY_DUE] = 1


def turn_kernel(phases: Phases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `turn`. Its arguments: the table, int64 [words + 2 * buckets], and behind it the step graph by
    bucket and by 1 if the batch has prefill chunks; uint64 [graphs + 1], handles of the WHILE nodes around each step graph,
    the last one for turns without a step; the loop's words; the trace, int64 [rows, TRACE_COLUMNS]; handles of the loop's
    WHILE and SWITCH nodes; index of the graph that the kernel is a part of, -1 for none.
    """
    read, decide, report, shared_words = table_reader(kind), phases.decide, phases.report, words + 2 * MOST_BUCKETS

    def turn(table, repeat, loop, trace, while_handle, switch_handle, own):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        # Before the step's end: all that the decision needs. Each load may go to memory, so nothing waits for one alone.
        turns, began, budget, traced = loop[LOOP_TURNS], loop[LOOP_BEGAN_NS], loop[LOOP_BUDGET_NS], loop[LOOP_TRACED]
        due, copies, copy_graph = loop[LOOP_COPY_DUE], loop[LOOP_COPIES], loop[LOOP_COPY_GRAPH]
        ahead_begin, ahead_end = loop[LOOP_AHEAD_BEGIN], loop[LOOP_AHEAD_END]
        shared = cuda.shared.array(shared_words, int64)
        engine = read(table, shared, lane, lanes)
        fetch_ahead(engine.limits, engine.state, lane, lanes)
        wait_for_predecessors()
        begin = now_ns()
        bucket = decide(engine.limits, engine.queues, engine.state, lane, lanes)
        counts = engine.state.batch.counts
        graph = int64(repeat.shape[0] - 1)  # without a step
        step = graph
        if bucket >= 0:
            graph = shared[words + 2 * bucket + (1 if counts[DECODE_ROWS] < counts[ROWS] else 0)]
            step = graph
            if due != 0:
                graph = copy_graph
        result = 0
        if bucket in (STOPPED, DRAINED):
            result = bucket
        elif budget != 0 and began != 0 and engine.state.inbox.now_ns[0] - began > budget:
            result = TIME_OVER
        tells = bucket < 0 or result != 0 or graph != step  # otherwise the report can wait until the step has begun
        if lane == 0:
            if graph != own:
                enter(repeat, switch_handle, own, graph)
            loop[LOOP_TURNS] = turns + 1
            loop[LOOP_TELL] = 0 if tells else 1
            if began == 0:
                loop[LOOP_BEGAN_NS] = begin
            if result != 0:
                leave(repeat, while_handle, own, graph)
                loop[LOOP_RESULT] = result
                engine.queues.engine[ENGINE_STATE] = STATE_STOPPED
            if bucket < 0:
                nanosleep(IDLE_SLEEP_NS)
        if tells:
            report(engine.limits, engine.queues, engine.state, lane, lanes)
            if lane == 0:
                recorder = engine.state.recorder
                if graph != step:  # the copy comes first, of the state as it is now
                    loop[LOOP_HELD], loop[LOOP_COPIES], loop[LOOP_COPY_DUE] = step, copies + 1, 0
                    loop[LOOP_COPY_AT] = recorder.cursor[POSITION] + loop[LOOP_COPY_EVERY]
                    recorder.progress[COPIES_BEGUN] = copies + 1
                else:
                    ask_for_copy(loop, recorder.cursor[POSITION])
        if lane == 0 and bucket >= 0 and traced < trace.shape[0]:
            end = now_ns()
            trace[traced, TRACE_BEGIN] = begin
            trace[traced, TRACE_END] = end
            trace[traced, TRACE_GRAPH] = step
            trace[traced, TRACE_ROWS] = counts[ROWS]
            trace[traced, TRACE_AHEAD_BEGIN] = ahead_begin
            trace[traced, TRACE_AHEAD_END] = ahead_end
            trace[traced, TRACE_STEADY] = engine.state.counts[STEADY]
            loop[LOOP_TRACED] = traced + 1

    return turn


@cuda.jit(device=True)
def enter(repeat, switch_handle, own, graph):
    """The next graph is another one: the WHILE around this one ends, and SWITCH enters that one's."""
    if own >= 0:
        set_condition(repeat[own], 0)
    set_condition(repeat[graph], 1)
    set_condition(switch_handle, graph)


@cuda.jit(device=True)
def leave(repeat, while_handle, own, graph):
    """No further turn."""
    if own >= 0:
        set_condition(repeat[own], 0)
    set_condition(repeat[graph], 0)
    set_condition(while_handle, 0)


def stamp_kernel() -> Callable[..., None]:
    """The Python function of a kernel that notes when the kernels before it are complete, for benchmarks. Arguments: the
    loop's words; the trace, int64 [rows, TRACE_COLUMNS]; and the column that gets the time, in the row that the step's turn will
    write. Nothing is between the moment and the clock: not the load that says which row, nor the turn's own trace."""

    def stamp(loop, trace, column):
        at = now_ns()
        row = loop[LOOP_TRACED]
        if column == TRACE_STEP_END:
            wait_for_predecessors()
            at = now_ns()
        if row < trace.shape[0]:
            trace[row, column] = at

    return stamp


def resume_kernel() -> Callable[..., None]:
    """The Python function of the kernel behind a copy of the state: it goes on with the step that the copy held up. Arguments:
    handles as of `turn`; the loop's words; Recorder.progress; handle of the SWITCH node; index of the graph that it is in."""

    def resume(repeat, loop, progress, switch_handle, own):
        enter(repeat, switch_handle, own, loop[LOOP_HELD])
        progress[COPIES_DONE] = loop[LOOP_COPIES]

    return resume


def loop_code(policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> LoopCode:
    """The compiled kernels for a GPU's compute capability; from the cache if this machine compiled these sources before."""
    phases = make_phases(policy)
    return LoopCode(
        _code("ahead", policy, kind, words, capability, lambda: (ahead_kernel(phases, kind, words), AHEAD_SIGNATURE)),
        _code("turn", policy, kind, words, capability, lambda: (turn_kernel(phases, kind, words), TURN_SIGNATURE)),
        _code("tell", policy, kind, words, capability, lambda: (tell_kernel(phases, kind, words), TELL_SIGNATURE)),
        _code("stamp", policy, kind, words, capability, lambda: (stamp_kernel(), STAMP_SIGNATURE)),
        _code("resume", policy, kind, words, capability, lambda: (resume_kernel(), RESUME_SIGNATURE)),
    )


def _code(
    name: str,
    policy: Policy,
    kind: Any,
    words: int,
    capability: tuple[int, int],
    source: Callable[[], tuple[Callable[..., None], Any]],
) -> KernelCode:
    path = _cached_at(name, policy, kind, words, capability)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return _load(path)
    code = compile_kernel(*source(), capability)
    if path is not None:
        with contextlib.suppress(OSError):
            _store(path, code)
    return code


def _cached_at(name: str, policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> Path | None:
    """File for the code, named by all that it depends on beside the package's sources; None where there is no cache."""
    folder, digest = cache_folder(), policy_digest(policy)
    if folder is None or digest is None:
        return None
    import numba_cuda

    what = (digest, kind.key, words, capability, numba.__version__, numba_cuda.__version__)
    return folder / f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.kernel"


def _store(path: Path, code: KernelCode) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    head = json.dumps({"entry": code.entry, "bytes": len(code.cubin)}).encode()
    temporary.write_bytes(head + b"\n" + code.cubin)
    temporary.replace(path)  # whole or not at all


def _load(path: Path) -> KernelCode:
    """Raises OSError or ValueError where there is no complete file."""
    head, _, cubin = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    if len(cubin) != facts["bytes"]:
        raise ValueError(f"{path} is cut short")
    return KernelCode(facts["entry"], "", cubin)
