"""Several ranks of one scheduler in one process, as a scheduler of the simulator: after each turn their states are equal."""

from collections.abc import Callable
from typing import Any

import numpy as np

from blinkpy.device.lanes import in_lanes
from blinkpy.device.tables import as_memoryviews, map_arrays, named_arrays
from blinkpy.kv.state import State
from blinkpy.queues.layout import EngineViews
from blinkpy.scheduler import rank_exchange as X
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import Policy

WORDS_OF_OTHERS = ("control", "front", "sq", "sq_long", "cancel", "hashes", "prompt")


def queues_of_rank(mirror: Any, outputs: Any) -> Any:
    """A rank's queues: words of other parties from the mirror, the engine's own words in `outputs`."""
    return outputs._replace(**{name: getattr(mirror, name) for name in WORDS_OF_OTHERS})


def exchanges(ranks: int, watched: list[np.ndarray]) -> list[X.Exchange]:
    """The exchange of each rank. watched: the rank's state as words."""
    shared = [np.zeros(size, np.int64) for size in (1, 2, 1, ranks * X.APART, ranks * X.APART)]
    own = [(np.zeros(X.OWN_WORDS, np.int64), np.zeros(2, np.int32)) for _ in range(ranks)]
    return [X.Exchange(rank, ranks, *shared, *own[rank], len(watched[rank]), watched[rank]) for rank in range(ranks)]


def blank(views: Any) -> EngineViews:
    return map_arrays(lambda array: np.zeros_like(np.asarray(array)), views)


def plain(tree: Any) -> Any:
    return tree._replace(**{name: item.data for name, item in tree._asdict().items() if isinstance(item, np.ndarray)})


class RankedTurns:
    """A turn of all ranks. The simulator calls it as a scheduler with rank 0's state.

    between: callback before each rank's part of a turn, with its number and the queues, which no other rank may read.
    phases: used instead of the policy's phases.
    lanes: number of lanes of each rank.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: int,
        between: Callable[[int, Any], None] = lambda rank, queues: None,
        phases: Any = None,
        lanes: int = 1,
    ):
        self._phases = phases or X.rank_phases(make_phases(policy))
        if lanes > 1:
            self._phases = type(self._phases)(*(in_lanes(part, lanes, races=True) for part in self._phases))
        self.ranks, self._between = ranks, between
        self.states: list[State] = []
        self.exchanges: list[X.Exchange] = []

    def _make(self, queues: Any, state: Any) -> None:
        arrays = map_arrays(np.asarray, state)
        self.states = [arrays, *(map_arrays(np.copy, arrays) for _ in range(1, self.ranks))]
        mirror = blank(queues)
        self._queues = [queues_of_rank(mirror, queues)]
        self._queues += [queues_of_rank(mirror, blank(queues)) for _ in range(1, self.ranks)]
        self._views = [as_memoryviews(some) for some in self._queues]
        self._plain = [as_memoryviews(some) for some in self.states]
        self._watched = [np.zeros(5000, np.int64) for _ in range(self.ranks)]
        self.exchanges = exchanges(self.ranks, self._watched)

    def __call__(self, limits: Any, queues: Any, state: Any, now: int, lane: int, lanes: int) -> int:
        if not self.states:
            self._make(queues, state)
        for other in self.states[1:]:  # all ranks get the tokens of the computed step
            other.batch.sampled[:] = self.states[0].batch.sampled
            other.batch.logprobs[:] = self.states[0].batch.logprobs
            other.batch.drafted[:] = self.states[0].batch.drafted
        results = []
        for rank in range(self.ranks):
            self._between(rank, queues)
            own = X.RankArguments(limits, queues, self._views[rank], plain(self.exchanges[rank]), self._plain[rank])
            clock = now if rank == 0 else -999  # the other ranks' values must not matter
            self._phases.overlap(own, clock, lane, lanes)
            results.append(self._phases.schedule(own, lane, lanes))
            if results[-1] != X.RANK_FAULT:
                self._phases.publish(own, lane, lanes)
        self._between(-1, queues)
        assert len(set(results)) == 1, results
        assert not self.differences()
        return results[0]

    def differences(self) -> list[str]:
        """Names of arrays in which a rank differs from rank 0."""
        first = dict(named_arrays(self.states[0]))
        return [
            f"rank {rank}: {name}"
            for rank in range(1, self.ranks)
            for name, array in named_arrays(self.states[rank])
            if not name.startswith("scratch.") and array.tobytes() != first[name].tobytes()
        ]
