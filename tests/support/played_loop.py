"""The loop on the GPU in plain Python: the functions of its kernels, and a CUDA graph's conditions as LoopGraph builds them.

A PlayedLoop is a scheduler of the simulator. Each call continues from the end of a step, or from a turn without a step, to the
next end, as the graph does. The simulator makes all its checks after each turn of the loop. In addition, each batch must run in a
graph captured for it, and each group of a cut step once and in order. The state may be copied only while no step is between two
groups, and after all earlier records are published.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blinkpy.kernels import loop_kernels as K
from blinkpy.kernels import loop_kernels as L
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits, groups_of_step
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.scheduler.cycle import engine_phases
from blinkpy.scheduler.policies import Policy

LOOP, SWITCH, FIRST_REPEAT, FIRST_PART = 1, 2, 1000, 2000  # handles of the graph's conditions
NEVER = 1 << 62
DEVICE_FUNCTIONS = ("ask_for_copy", "select_graph", "select_group", "end_loop")
END = object()


def graphs_of(limits: Limits, buckets: list[tuple[int, int]]) -> tuple[list[StepShape], NDArray[np.int64]]:
    """Step graphs, one for each kind of batch, the graphs of cut steps last; and the graph of each batch, [buckets, kinds]. An
    engine has fewer (blinkpy.models.gpu.step_shapes), because its kinds share graphs."""
    shapes, table = list[StepShape](), np.zeros((len(buckets), K.GRAPHS_OF_BUCKET), np.int64)
    for kind in (S.DECODE_STEP, S.MIXED_STEP, S.DRAFTED_STEP, S.CUT_STEP):
        for bucket, (tokens, rows) in enumerate(buckets):
            groups = groups_of_step(limits.step_groups, tokens, limits.tokens) if kind == S.CUT_STEP else 1
            if kind != S.CUT_STEP or groups > 1:
                table[bucket, kind] = len(shapes)
                mixed, drafted = kind in (S.MIXED_STEP, S.CUT_STEP), kind == S.DRAFTED_STEP
                shapes.append(StepShape(tokens, rows, mixed=mixed, groups=groups, drafted=drafted))
    return shapes, table


class PlayedLoop:
    """A scheduler that plays the loop's graph. patch: patches the kernels' module from the first turn on. copy_every: words of
    the recorder between two copies of the state. budget_ns: time after which the loop ends by itself. steps, groups, drafted,
    copies: numbers so far."""

    def __init__(self, patch: pytest.MonkeyPatch, policy: Policy, copy_every: int = NEVER, budget_ns: int = 0):
        self._patch, self._policy, self._every, self._budget = patch, policy, copy_every, budget_ns
        self._conditions = dict[int, int]()
        self._turns: Iterator[None] | None = None
        self._now = self._bucket = 0
        self._chosen = False  # the last turn's decision was not yet executed
        self.words = np.zeros(L.LOOP_WORDS, np.int64)
        self.steps = self.groups = self.drafted = self.copies = self._copied_at = 0

    def __call__(self, limits: Any, queues: Any, state: Any, now: int, lane: int, lanes: int) -> int:
        """Make a turn: returns its bucket, or the reason for no step."""
        self._now = now
        if self._turns is None:
            self._make(limits, queues, state)
            self._turns = self._played()
        if next(self._turns, END) is END:
            assert self.words[L.LOOP_RESULT] in (self._bucket, L.TIME_OVER)
        return self._bucket

    def _make(self, limits: Any, queues: Any, state: Any) -> None:
        self._state, self._step_groups = state, limits.step_groups
        self._phases = K.loop_phases(self._policy, limits)  # as the engine compiles them
        self._shapes, table = graphs_of(limits, list(zip(state.buckets.tokens, state.buckets.rows, strict=True)))
        self._whole = sum(shape.groups == 1 for shape in self._shapes)
        self._copying, self._idle = len(self._shapes), len(self._shapes) + 1
        words = {L.LOOP_COPY_GRAPH: self._copying, L.LOOP_FIRST_CUT: self._whole, L.LOOP_BUDGET_NS: self._budget}
        words |= {L.LOOP_COPY_AT: self._every, L.LOOP_COPY_EVERY: self._every}
        self.words[list(words)] = list(words.values())
        self._table, self._trace = table.ravel(), np.zeros((1, L.TRACE_COLUMNS), np.int64)
        self._repeat = np.arange(FIRST_REPEAT, FIRST_REPEAT + self._idle + 1)
        self._parts = np.arange(FIRST_PART, FIRST_PART + max(1, limits.step_groups * len(self._shapes)))
        self._conditions = dict.fromkeys([SWITCH, *self._repeat.tolist(), *self._parts.tolist()], 0) | {LOOP: 1}
        arguments = K.Arguments(limits, queues, state)

        def read(table: Any, shared: Any, lane: int, lanes: int) -> K.Arguments:
            shared[: len(table)] = table
            return arguments

        def set_condition(handle: int, value: int) -> None:
            assert int(handle) in self._conditions
            self._conditions[int(handle)] = int(value)

        shared = SimpleNamespace(array=lambda size, kind: np.zeros(size, np.int64))
        alone = {"threadIdx": SimpleNamespace(x=0), "blockDim": SimpleNamespace(x=1), "syncthreads": lambda: None}
        plain = {"cuda": SimpleNamespace(shared=shared, **alone), "table_reader": lambda kind: read}
        plain |= {"set_condition": set_condition, "now_ns": lambda: self._now}
        plain |= dict.fromkeys(("nanosleep", "let_successors_begin", "wait_for_predecessors"), lambda *nothing: None)
        plain |= {name: getattr(K, name) for name in DEVICE_FUNCTIONS}
        for name, function in plain.items():
            self._patch.setattr(K, name, getattr(function, "py_func", function))
        phases = self._phases._replace(schedule=self._scheduled)
        kernels = K.overlap_kernel, K.publish_kernel, K.schedule_kernel
        self._overlap_kernel, self._publish_kernel, self._schedule_kernel = (
            make(engine_phases(phases), None, 0) for make in kernels
        )
        self._after_copy_kernel = K.after_copy_kernel()

    def _scheduled(self, limits: Any, queues: Any, state: Any, lane: int, lanes: int) -> int:
        assert not self._chosen  # the previous turn's decision was executed
        self._chosen, self._bucket = True, self._phases.schedule(limits, queues, state, lane, lanes)
        return self._bucket

    # ---- the graph ---------------------------------------------------------------------------------------------------

    def _played(self) -> Iterator[None]:
        """Yields after each step, and after each turn without a step. Runs `overlap` before the first turn, too, because the
        simulator's first turn has submissions to read."""
        conditions = self._conditions
        self._overlap_kernel(self._table, self.words)
        self._schedule(-1)
        while conditions[LOOP]:
            own = conditions[SWITCH]
            assert conditions[FIRST_REPEAT + own]
            while conditions[FIRST_REPEAT + own]:
                if own == self._copying:
                    self._copy()
                elif own == self._idle:
                    assert self._bucket == S.NO_BATCH
                    yield from self._turn(own)
                elif own < self._whole:
                    yield from self._step(own, 0)
                else:
                    steps, first = self.steps, (own - self._whole) * self._step_groups
                    for group in range(self._shapes[own].groups):
                        if conditions[int(self._parts[first + group])]:
                            yield from self._step(own, group)
                    assert self.steps > steps

    def _step(self, own: int, group: int) -> Iterator[None]:
        """Run a step, or a group of a cut step; assert that its graph was captured for such a batch."""
        counts, shape = self._state.batch.counts, self._shapes[own]
        buckets, others = self._state.buckets, bool(counts[S.DECODE_ROWS] < counts[S.ROWS])
        assert counts[S.BUCKET] == self._bucket >= 0
        drafted = others and counts[S.TOKENS] == counts[S.ROWS] and counts[S.GROUPS] == 1
        kind: dict[str, Any] = {"mixed": others and not drafted, "groups": counts[S.GROUPS], "drafted": drafted}
        assert shape == StepShape(buckets.tokens[self._bucket], buckets.rows[self._bucket], **kind)
        self.drafted += S.DRAFT in list(self._state.batch.emits)[: counts[S.ROWS]]
        assert group == counts[S.GROUP]
        self.steps += 1
        self.groups += shape.groups > 1
        self._publish_kernel(self._table, self.words)
        yield from self._turn(own)

    def _turn(self, own: int) -> Iterator[None]:
        assert self._chosen and not self.words[L.LOOP_RESULT] and not self._state.forecast.unpublished[0]
        self._chosen = False
        yield
        self._overlap_kernel(self._table, self.words)
        self._schedule(own)

    def _schedule(self, own: int) -> None:
        handles = LOOP, SWITCH, own
        due = self.words[L.LOOP_COPY_DUE]
        self._schedule_kernel(self._table, self._repeat, self._parts, self.words, self._trace, *handles)
        begins = self._bucket >= 0 and self._state.batch.counts[S.GROUP] == 0 and self.words[L.LOOP_RESULT] == 0
        assert (self._conditions[SWITCH] == self._copying) == (due != 0 and begins) or not self._conditions[LOOP]

    def _copy(self) -> None:
        recorder, counts = self._state.recorder, self._state.batch.counts
        assert counts[S.GROUP] == 0 and not self._state.forecast.unpublished[0]
        position = int(recorder.cursor[S.POSITION])
        assert self._conditions[LOOP] and recorder.progress[S.POSITION] == position
        assert position - self._copied_at >= self._every, "a copy follows the last copy too soon"
        self._copied_at = position
        self.copies += 1
        assert recorder.progress[S.COPIES_BEGUN] == self.copies
        self._after_copy_kernel(self._repeat, self.words, recorder.progress, SWITCH, self._copying)
        assert recorder.progress[S.COPIES_DONE] == self.copies
