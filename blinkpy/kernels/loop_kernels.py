"""The kernels of the loop on the GPU: the parts of a turn, which run during and after each step.

Each is one block. `schedule` commits the step, plans the next one, sets the graph's conditional nodes to
the step graph, and writes times into the trace. `publish` and `overlap` run during a step: `publish` at its
start, with the results of `schedule`, `overlap` near its end. See blinkpy.engine.loop_graph.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cache_folder
from blinkpy.device.cuda.kernel_compiler import VERSION, KernelCode, compile_kernel, cuda, types
from blinkpy.device.cuda_primitives import let_successors_begin, set_condition, wait_for_predecessors
from blinkpy.device.expect import is_faulted
from blinkpy.device.portable import nanosleep, now_ns, register_cuda, strided
from blinkpy.device.tables import TableType, cuda_table_reader, make_table
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits, step_kind
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.words import ENGINE_STATE, STATE_STOPPED
from blinkpy.scheduler.cycle import EnginePhases, Phases, engine_phases, make_phases
from blinkpy.scheduler.phases.fast_path import prefetch_forecast
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.policy_key import policy_digest
from blinkpy.scheduler.rank_exchange import RANK_FAULT, Exchange, RankArguments, rank_phases

# Words of the loop, int64, in GPU memory.
LOOP_BUDGET_NS = 0  # time limit from the first turn; 0: no limit
LOOP_BEGAN_NS = 1  # clock of the first overlap
LOOP_TURNS = 2
LOOP_TRACED = 3  # rows written to the trace
LOOP_RESULT = 4  # reason of the loop's end: STOPPED, DRAINED, TIME_OVER or RANK_FAULT
LOOP_OVERLAP_BEGIN = 5  # clock of the last `overlap`
LOOP_OVERLAP_END = 6
LOOP_COPY_GRAPH = 7  # branch of SWITCH that copies the state for the flight recorder
LOOP_COPY_AT = 8  # words recorded at which the next copy is due
LOOP_COPY_EVERY = 9  # words between two copies
LOOP_COPY_DUE = 10  # 1: before the next step
LOOP_COPIES = 11  # copies begun
LOOP_DELAYED_GRAPH = 12  # step graph that follows the copy
LOOP_PUBLISH_DUE = 13  # 1: `publish` still has to publish the last turn
LOOP_FIRST_CUT = 14  # index of the first step graph that is cut into groups
LOOP_WORDS = 15
TIME_OVER = -100

# Columns of the trace, int64, one row for each turn that planned a batch. Times are of the GPU's clock, ns.
TRACE_BEGIN = 0  # the previous step is complete
TRACE_END = 1  # the turn's decision is made
TRACE_GRAPH = 2
TRACE_ROWS = 3
TRACE_OVERLAP_BEGIN = 4  # of `overlap`
TRACE_OVERLAP_END = 5
TRACE_STEP_BEGIN = 6  # of the completed step, written by stamps; 0 without stamps
TRACE_STEP_END = 7
TRACE_FAST_PATH = 8  # 1: the turn may have taken the fast path
TRACE_GROUP = 9  # the layer group that follows; 0 at the start of a step
TRACE_COLUMNS = 10


register_cuda()

int64, uint64 = types.int64, types.uint64
LANES = 256
IDLE_SLEEP_NS = 500

MAX_BUCKETS = 120
WORDS, HANDLES, TRACE = int64[::1], uint64[::1], int64[:, ::1]
OVERLAP_SIGNATURE = types.void(WORDS, WORDS)
PUBLISH_SIGNATURE = types.void(WORDS, WORDS)
SCHEDULE_SIGNATURE = types.void(WORDS, HANDLES, HANDLES, WORDS, TRACE, uint64, uint64, int64)
GRAPHS_OF_BUCKET = len(S.STEP_KINDS)
STAMP_SIGNATURE = types.void(WORDS, TRACE, int64)
AFTER_COPY_SIGNATURE = types.void(HANDLES, WORDS, WORDS, uint64, int64)


class Arguments(NamedTuple):
    """The arguments of schedule()."""

    limits: Limits
    queues: EngineViews
    state: S.State


def device_arguments(
    limits: Limits, queues: EngineViews, state: S.State, rank: tuple[EngineViews, Exchange] | None = None
) -> tuple[TableType, NDArray[np.int64]]:
    """Type and words of the table for a kernel. The arrays are on the GPU; the words must be copied there,
    too. The type does not depend on sizes.

    rank: the queues of the front ends and the exchange, for one of several ranks.
    """
    if rank is None:
        return make_table(Arguments(limits, queues, state), strided_parts=("queues",))
    source, exchange = rank
    return make_table(RankArguments(limits, source, queues, exchange, state), strided_parts=("source", "queues"))


def table_reader(kind: TableType) -> Callable[[Any, Any, Any, Any], Any]:
    """A device function read(table, shared, lane, lanes) for kernels of one block: copies a table (int64, from
    device_arguments) from global to shared memory, for fast access, and returns its arguments. Called by all
    lanes.
    """
    read_tree = cuda_table_reader(kind)

    @cuda.jit(device=True)
    def read(table, shared, lane, lanes):
        for word in strided(lane, table.shape[0], lanes):
            shared[word] = table[word]
        cuda.syncthreads()
        return read_tree(shared)

    return read


def overlap_kernel(phases: EnginePhases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `overlap`. kind, words: type and words of its table (see device_arguments). Arguments: the table,
    int64 [words], with the data of `schedule` after it; the loop's words.
    """
    read, run, shared_words = table_reader(kind), phases.overlap, words + GRAPHS_OF_BUCKET * MAX_BUCKETS

    def overlap(table, loop):
        let_successors_begin()  # the last product of a layer group must not occupy this block's SM
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(shared_words, int64), lane, lanes)
        clock = cuda.shared.array(1, int64)
        if lane == 0:
            clock[0] = now_ns()
        cuda.syncthreads()  # all lanes must use the same time
        run(arguments, clock[0], lane, lanes)
        if lane == 0:
            loop[LOOP_OVERLAP_BEGIN] = clock[0]
            loop[LOOP_OVERLAP_END] = now_ns()

    return overlap


def publish_kernel(phases: EnginePhases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `publish`, for the turn before the current step. Counters, gauges and the
    heartbeat go to the host's memory, and no kernel waits for them. Arguments as in `overlap`.
    """
    read, publish, shared_words = table_reader(kind), phases.publish, words + GRAPHS_OF_BUCKET * MAX_BUCKETS

    def publish_after(table, loop):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        engine = read(table, cuda.shared.array(shared_words, int64), lane, lanes)
        due = loop[LOOP_PUBLISH_DUE]
        cuda.syncthreads()
        if due != 0:
            publish(engine, lane, lanes)
            if lane == 0:
                loop[LOOP_PUBLISH_DUE] = 0
                ask_for_copy(loop, engine.state.recorder.cursor[S.POSITION])

    return publish_after


@cuda.jit(device=True)
def ask_for_copy(loop, position):
    """One lane, after publishing: set LOOP_COPY_DUE if a copy of the state is due. position: words
    recorded.
    """
    if position >= loop[LOOP_COPY_AT]:
        loop[LOOP_COPY_DUE] = 1


def schedule_kernel(phases: EnginePhases, kind: Any, words: int) -> Callable[..., None]:
    """The Python function of `schedule`. Its arguments:

    table: int64 [words + GRAPHS_OF_BUCKET * buckets], the table, then the index of the step graph by bucket and
        kind of batch (step_kind).
    repeat: uint64 [graphs + 1], handles of the WHILE nodes around each graph; the last handle is for turns without a step.
    parts: uint64, handles of the IF nodes around the groups of each cut graph, limits.step_groups places for
        each, from LOOP_FIRST_CUT on.
    loop: the loop's words.
    trace: int64 [rows, TRACE_COLUMNS].
    while_handle, switch_handle: handles of the loop's WHILE and SWITCH nodes.
    own: index of the graph that contains the kernel, or -1.
    """
    read, schedule, publish, shared_words = (
        table_reader(kind),
        phases.schedule,
        phases.publish,
        words + GRAPHS_OF_BUCKET * MAX_BUCKETS,
    )

    def schedule_and_select(table, repeat, parts, loop, trace, while_handle, switch_handle, own):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        # Before the step's end, load all data of the decision together, because each load may go to memory.
        turns, began, budget, traced = loop[LOOP_TURNS], loop[LOOP_BEGAN_NS], loop[LOOP_BUDGET_NS], loop[LOOP_TRACED]
        due, copies, copy_graph = loop[LOOP_COPY_DUE], loop[LOOP_COPIES], loop[LOOP_COPY_GRAPH]
        overlap_begin, overlap_end = loop[LOOP_OVERLAP_BEGIN], loop[LOOP_OVERLAP_END]
        shared = cuda.shared.array(shared_words, int64)
        engine = read(table, shared, lane, lanes)
        prefetch_forecast(engine.limits, engine.state, lane, lanes)
        wait_for_predecessors()
        begin = now_ns()
        bucket = schedule(engine, lane, lanes)
        if is_faulted(engine.state):  # only if the state is checked
            bucket = S.STOPPED
        counts = engine.state.batch.counts
        graph = step = int64(repeat.shape[0] - 1)  # without a step
        if bucket >= 0:
            graph = shared[words + GRAPHS_OF_BUCKET * bucket + step_kind(counts)]
            step = graph
            if due != 0 and counts[S.GROUP] == 0:
                graph = copy_graph
        result = 0
        if bucket in (S.STOPPED, S.DRAINED, RANK_FAULT):
            result = bucket
        elif budget != 0 and began != 0 and engine.state.inbox.now_ns[0] - began > budget:
            result = TIME_OVER
        publishes = bucket < 0 or result != 0 or graph != step  # otherwise publishing waits until the step has begun
        if bucket >= 0 and counts[S.GROUPS] > 1:
            first = (step - loop[LOOP_FIRST_CUT]) * engine.limits.step_groups
            select_group(parts, first, counts, result == 0, lane, lanes)
        if lane == 0:
            if graph != own:
                select_graph(repeat, switch_handle, own, graph)
            loop[LOOP_TURNS] = turns + 1
            loop[LOOP_PUBLISH_DUE] = 0 if publishes else 1
            if began == 0:
                loop[LOOP_BEGAN_NS] = engine.state.inbox.now_ns[0]  # equal on all ranks
            if result != 0:
                end_loop(repeat, while_handle, own, graph)
                loop[LOOP_RESULT] = result
                if result != RANK_FAULT:  # the host announces this fault
                    engine.queues.engine[ENGINE_STATE] = STATE_STOPPED
            if bucket < 0:
                nanosleep(IDLE_SLEEP_NS)
        if publishes and result != RANK_FAULT:
            publish(engine, lane, lanes)
            if lane == 0:
                recorder = engine.state.recorder
                if graph != step:  # copy the current state first
                    loop[LOOP_DELAYED_GRAPH], loop[LOOP_COPIES], loop[LOOP_COPY_DUE] = step, copies + 1, 0
                    loop[LOOP_COPY_AT] = recorder.cursor[S.POSITION] + loop[LOOP_COPY_EVERY]
                    recorder.progress[S.COPIES_BEGUN] = copies + 1
                else:
                    ask_for_copy(loop, recorder.cursor[S.POSITION])
        if lane == 0 and bucket >= 0 and traced < trace.shape[0]:
            end = now_ns()
            trace[traced, TRACE_BEGIN] = begin
            trace[traced, TRACE_END] = end
            trace[traced, TRACE_GRAPH] = step
            trace[traced, TRACE_ROWS] = counts[S.ROWS]
            trace[traced, TRACE_OVERLAP_BEGIN] = overlap_begin
            trace[traced, TRACE_OVERLAP_END] = overlap_end
            trace[traced, TRACE_GROUP] = counts[S.GROUP]
            trace[traced, TRACE_FAST_PATH] = engine.state.counts[S.FAST_PATH]
            loop[LOOP_TRACED] = traced + 1

    return schedule_and_select


@cuda.jit(device=True)
def select_graph(repeat, switch_handle, own, graph):
    """Select another graph: end the WHILE around this one, and let SWITCH enter the other's."""
    if own >= 0:
        set_condition(repeat[own], 0)
    set_condition(repeat[graph], 1)
    set_condition(switch_handle, graph)


@cuda.jit(device=True)
def select_group(parts, first, counts, runs, lane, lanes):
    """Enable only the next layer group in the graph of a cut step.

    first: the first of its groups in parts.
    runs: whether the step runs at all. After a suspended group, no further group is enabled.
    """
    for group in strided(lane, counts[S.GROUPS], lanes):
        set_condition(parts[first + group], 1 if runs and group == counts[S.GROUP] else 0)


@cuda.jit(device=True)
def end_loop(repeat, while_handle, own, graph):
    """End the loop."""
    if own >= 0:
        set_condition(repeat[own], 0)
    set_condition(repeat[graph], 0)
    set_condition(while_handle, 0)


def stamp_kernel() -> Callable[..., None]:
    """The Python function of a kernel that records when the previous kernels are complete, for benchmarks.

    Arguments: the loop's words; the trace, int64 [rows, TRACE_COLUMNS]; and the column for the time, in the
        row that the step's turn will write. The clock is read first, before the load of the row's index and
        the turn's own trace.
    """

    def stamp(loop, trace, column):
        at = now_ns()
        row = loop[LOOP_TRACED]
        if column == TRACE_STEP_END:
            wait_for_predecessors()
            at = now_ns()
        if row < trace.shape[0]:
            trace[row, column] = at

    return stamp


def after_copy_kernel() -> Callable[..., None]:
    """The Python function of the kernel after a copy of the state, which continues with the delayed step.
    Arguments: handles as in `schedule`; the loop's words; Recorder.progress; handle of the SWITCH node; index
    of the graph that it is in.
    """

    def after_copy(repeat, loop, progress, switch_handle, own):
        select_graph(repeat, switch_handle, own, loop[LOOP_DELAYED_GRAPH])
        progress[S.COPIES_DONE] = loop[LOOP_COPIES]

    return after_copy


# The loop's kernels, compiled for a GPU and cached on disk.


class LoopCode(NamedTuple):
    """The compiled kernels of the loop."""

    overlap: KernelCode
    schedule: KernelCode
    publish: KernelCode
    stamp: KernelCode
    after_copy: KernelCode


def loop_phases(policy: Policy, limits: Limits) -> Phases:
    """The scheduler of an engine's loop. The code of drafts and of snapshots is left out if they are off."""
    return make_phases(policy, drafts=limits.draft_tokens > 0, snapshots=limits.snapshots > 0)


def loop_code(
    policy: Policy, limits: Limits, kind: Any, words: int, capability: tuple[int, int], *, ranked: bool = False
) -> LoopCode:
    """The compiled kernels for a GPU's compute capability; from the cache if this machine compiled these sources before.

    ranked: whether the kernels are for one of several ranks.
    """
    make, parts = rank_phases if ranked else engine_phases, (limits.draft_tokens > 0, limits.snapshots > 0)
    phases = make(loop_phases(policy, limits))

    def code(name: str, signature: Any, kernel: Callable[..., Callable[..., None]], *arguments: Any) -> KernelCode:
        path = _cached_at(name, policy, kind, words, parts, capability)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return _load(path)
        compiled = compile_kernel(kernel(*arguments), signature, capability)
        if path is not None:
            with contextlib.suppress(OSError):
                _store(path, compiled)
        return compiled

    return LoopCode(
        code("overlap", OVERLAP_SIGNATURE, overlap_kernel, phases, kind, words),
        code("schedule", SCHEDULE_SIGNATURE, schedule_kernel, phases, kind, words),
        code("publish", PUBLISH_SIGNATURE, publish_kernel, phases, kind, words),
        code("stamp", STAMP_SIGNATURE, stamp_kernel),
        code("after_copy", AFTER_COPY_SIGNATURE, after_copy_kernel),
    )


def _cached_at(
    name: str, policy: Policy, kind: Any, words: int, parts: tuple[bool, bool], capability: tuple[int, int]
) -> Path | None:
    """File for the code, named by its dependencies other than the package's sources; None without a cache."""
    folder, digest = cache_folder(), policy_digest(policy)
    if folder is None or digest is None:
        return None
    what = (digest, kind.key, words, parts, capability, *VERSION)
    return folder / f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.kernel"


def _store(path: Path, code: KernelCode) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    head = json.dumps({"entry": code.entry, "bytes": len(code.cubin)}).encode()
    temporary.write_bytes(head + b"\n" + code.cubin)
    temporary.replace(path)  # atomically


def _load(path: Path) -> KernelCode:
    """Load the code from a file. Raises OSError or ValueError if the file is missing or incomplete."""
    head, _, cubin = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    if len(cubin) != facts["bytes"]:
        raise ValueError(f"{path} is truncated")
    return KernelCode(facts["entry"], "", cubin)
