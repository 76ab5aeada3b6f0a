"""The scheduler on the host, compiled by njit or run as plain Python."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from numba import njit, types

from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.tables import ArgumentTable, as_memoryviews
from blinkpy.kv.invariants.check_state import check_scratch, compiled_check, state_faults, table_faults
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues.layout import EngineViews, QueueLayout, QueueSizes, engine_views
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.scheduler.policy_key import policy_digest


@lru_cache(maxsize=8)
def compiled_turn(policy: Policy) -> Any:
    """The turn as an njit function. It takes Tables (device/tables.py), and releases the GIL."""
    schedule, digest = make_turn(policy), policy_digest(policy)
    return njit(schedule, nogil=True) if digest is None else cached_njit(schedule, (digest,), nogil=True)


def table_kinds(limits: Limits, state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Numba's types of the arguments of a turn, and of a check."""
    own = ArgumentTable(limits).kind, ArgumentTable(state).kind
    queues = ArgumentTable(_some_views(), strided=True).kind
    return (own[0], queues, own[1], types.int64, types.int64, types.int64), own


class Scheduler:
    """The scheduler on the host: binds limits, memory and queues to the compiled function, or to the plain source.

    limits, state: results of make_limits and make_state. mode: "njit" compiles, which takes some 20 s if the sources
    have changed; "python" interprets the source, about a hundred times slower.
    """

    def __init__(self, limits: Limits, state: State, policy: Policy = fcfs, *, mode: Literal["njit", "python"] = "njit") -> None:
        self.limits = limits
        self.state = state
        self.mode = mode
        self._function: Callable[..., int]
        self._limits: Any
        self.state_argument: Any  # the state in the form that the function takes
        self._queues: Any
        if mode == "njit":
            self._limits, self.state_argument = ArgumentTable(limits), ArgumentTable(state)
            self._queues = ArgumentTable(_some_views(), strided=True)
            self._function = compiled_for(compiled_turn(policy), table_kinds(limits, state)[0])
            self._scratch = check_scratch(limits)
        else:
            self._limits, self.state_argument = limits, as_memoryviews(state)
            self._function = make_turn(policy)
        self._attached = False

    def attach(self, queues: EngineViews) -> None:
        """Bind the queue segment. Call it before the first turn."""
        self._queues = ArgumentTable(queues, strided=True) if self.mode == "njit" else as_memoryviews(queues)
        self._attached = True

    def turn(self, now_ns: int) -> int:
        """Commit the last step's state.batch.sampled and plan the next step. See make_turn.

        now_ns: time of the monotonic clock.
        """
        if not self._attached:
            raise RuntimeError("call attach() before the first turn")
        return self._function(self._limits, self._queues, self.state_argument, now_ns, 0, 1)

    def check(self) -> list[str]:
        """Descriptions of the state's faults; empty if it has no fault."""
        if self.mode == "njit":
            return table_faults(self.state, self._limits, self.state_argument, self._scratch)
        return state_faults(self.limits, self.state)

    def load_check(self) -> None:
        """Compile or load the check now, so that the first check is as fast as later checks."""
        compiled_check(table_kinds(self.limits, self.state)[1])

    def close(self) -> None:
        """Free resources other than memory."""


def _some_views() -> EngineViews:
    """Views of a minimal segment; all segments' views have the same types."""
    layout = QueueLayout(QueueSizes(pairs=1, slots=1, sq_entries=2, cq_entries=2, prompt_tokens=16, hash_entries=1))
    return engine_views(memoryview(bytearray(layout.total_bytes)), layout)
