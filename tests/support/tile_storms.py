"""Storms so large that every strided loop of the scheduler runs several tiles, by njit and by another execution.

After each turn both must leave the same state, bit for bit. The sizes follow from the lanes of the other execution, so a few
lanes of plain Python run the same cases as a block of threads on a GPU.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.scheduler_cases import case_sizes

from blinkpy.device.tables import map_arrays, named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import differences
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_RUN, COMMAND_STOP, COUNTER_NAMES
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import Odds, World, WorldSizes, make_world

STEP_INPUTS = ("batch.sampled", "batch.logprobs", "batch.drafted")
ENDINGS = (COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP)
NEVER = dict.fromkeys(Odds._fields, 0) | {"comeback": 200, "notice": 300}
WILD = Odds(**NEVER | {
    "submit": 700, "answer": 1, "burst": 120, "cancel": 60, "crash": 1, "silent": 3, "late": 10, "broken": 1, "bad": 100,
    "pace": 20, "delay": 100, "jump": 2, "poison": 10,
})  # fmt: skip
# All front ends submit as much as they can at the same time: a turn accepts more than a tile of entries.
CROWD = WILD._replace(notice=1000, submit=1000, burst=400, delay=0)
# Many leases end, and last completions wait; a front end fills all its slots together.
LOSSY = WILD._replace(answer=12, cancel=300, delay=1000, jump=60, bad=500, pace=200, burst=400)
QUIET = Odds(**NEVER | {"submit": 45, "answer": 256, "burst": 60})
PACE_MS = 0.13  # two and a half turns
# The tiled arrays, and the number of full tiles that some turn must have in addition to a partial tile.
TILES = {"rows": 2, "fast rows": 2, "tokens": 2, "running": 2, "waiting": 2, "ended": 1, "accepted": 1}
TILES |= {"paced": 1, "suspended rows": 1, "request pages": 2, "hit pages": 2, "prompt": 2, "evicted": 2, "ring": 2}
# Counters that stay 0: faults, and refused drafts, because the requests of these storms have no grammar.
NOT_COUNTED = ("integrity_errors", "policy_faults", "draft_tokens_refused")
HAPPENED = (
    *("drained", "stopped", "compactions", "mixed budget", "burst budget", "largest budget", "cut", "suspended", "resumed"),
    *(name for name in COUNTER_NAMES if name not in NOT_COUNTED),
)


def wide(
    lanes: int, pairs: int, cq_entries: int, pages: int, page_size: int, max_model_len: int, step_groups: int = 1
) -> WorldSizes:
    """Many rows, slots and pages, and more queue pairs than a turn counts together."""
    rows = 2 * lanes + lanes // 4 + 2
    return case_sizes(
        pairs=pairs, slots=lanes * 6 // pairs + 1, cq_entries=cq_entries, rows=rows, page_size=page_size, pages=pages,
        max_model_len=max_model_len, vocab_size=1000, intake_entries=4 * lanes, record_turns=4, share=lanes + 2,
        tokens=4 * rows, mixed_step_tokens=2 * rows, burst_step_tokens=3 * rows, burst_tokens=6 * rows,
        best_effort_pages=0.75, best_effort_step_tokens=3 * rows, step_groups=step_groups, cut_step_tokens=rows // 2,
    )  # fmt: skip


def long(lanes: int, **options: int) -> WorldSizes:
    """Few requests of many pages. options: see make_limits."""
    context = 5 * lanes
    return case_sizes(
        pairs=4, slots=6, rows=4, page_size=2, pages=3 * context, max_model_len=context, tokens=2 * context,
        mixed_step_tokens=max(8, context // 6), burst_step_tokens=context, burst_tokens=context, record_turns=4, share=lanes + 2,
        best_effort_pages=0.5, best_effort_step_tokens=context, **options,
    )  # fmt: skip


def paced(lanes: int) -> WorldSizes:
    """Space for all requests, so that no request waits, and a pace."""
    rows = 2 * lanes + lanes // 4 + 2
    return case_sizes(
        pairs=2, slots=rows // 2, cq_entries=1 << (8 * rows).bit_length(), rows=rows, page_size=16, pages=24 * lanes,
        max_model_len=128, vocab_size=1000, intake_entries=4 * lanes, record_turns=4, tokens=16 * rows, tpot_target_ms=PACE_MS,
    )  # fmt: skip


def drafting(lanes: int, speculative: str) -> WorldSizes:
    """Two different tokens, so that requests are repetitive, and spare rows for drafts. speculative: source of the drafts."""
    rows = 4 * lanes + lanes // 4 + 2
    return case_sizes(
        pairs=2, slots=rows // 2, cq_entries=1 << (8 * rows).bit_length(), rows=rows, page_size=4, pages=24 * lanes,
        max_model_len=96, vocab_size=2, intake_entries=4 * lanes, record_turns=4, tokens=16 * rows, speculative=speculative,
        speculative_tokens=5, **({"speculative_match": 3} if speculative == "ngram" else {}),
    )  # fmt: skip


def storms(lanes: int) -> list[tuple[WorldSizes, Odds]]:
    few, some, many = (1 << max(1, (entries * lanes // 16).bit_length()) for entries in (1, 4, 80))
    return [
        (wide(lanes, 16, some, 8 * lanes, 4, 48, 3), WILD),
        (long(lanes), WILD._replace(answer=40)),
        (long(lanes, snapshots=3 * lanes, snapshot_tokens=4), WILD._replace(answer=40)),
        (wide(lanes, 9, many, 20 * lanes, 16, 256), QUIET),
        (wide(lanes, 16, many, 16 * lanes, 4, 48, 4), WILD._replace(submit=60, burst=3, answer=6, cancel=5, bad=10, delay=0)),
        (wide(lanes, 16, few, 8 * lanes, 4, 48), LOSSY),
        (paced(lanes), QUIET._replace(submit=15, burst=20)),  # few requests, whose steps are held
        (paced(lanes), QUIET._replace(submit=80, burst=5 * lanes)),
        (wide(lanes, 16, some, 8 * lanes, 4, 48, 3), CROWD),
        *((drafting(lanes, source), QUIET._replace(submit=40, burst=2 * lanes, answer=80)) for source in ("ngram", "mtp")),
    ]


class Mirror:
    """A copy of state and queues in one piece of memory on a device: first the words of other parties, then the scheduler's."""

    def __init__(self, state: State, queues: EngineViews, device: str):
        arrays = dict(named_arrays(queues)) | dict(named_arrays(state))
        del arrays["sq_long"]  # the same memory as sq
        inputs = [name for name in EngineViews._fields if name in ("front", "sq", "cancel", "hashes", "prompt", "control")]
        inputs += STEP_INPUTS
        scratch = [name for name in arrays if name.startswith("scratch.")]
        written = [name for name in arrays if name not in (*inputs, *scratch)]
        self._ours, places, end = arrays, dict[str, slice](), 0
        for name in (*inputs, *written, *scratch):
            places[name] = slice(end, end + arrays[name].nbytes)
            end += -(-arrays[name].nbytes // 16) * 16
        self._inputs, self._written = inputs, written
        self._input_bytes, self._written_bytes = places[written[0]].start, places[scratch[0]].start
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device != "cpu")
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self._copies = {
            name: self._host[place].numpy().view(arrays[name].dtype).reshape(arrays[name].shape) for name, place in places.items()
        }
        for name, array in arrays.items():
            self._copies[name][...] = array
        self._memory.copy_(self._host)
        kinds = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
        tensors = {
            id(array): self._memory[places[name]].view(kinds[array.dtype]).view(array.shape) for name, array in arrays.items()
        }
        self.state: State = map_arrays(lambda array: tensors[id(array)], state)
        mirrored = map_arrays(lambda array: tensors.get(id(array)), queues)
        self.queues: EngineViews = mirrored._replace(sq_long=mirrored.sq.view(torch.int64))

    def push(self) -> None:
        """Copy all words that front ends, host and the step have written."""
        for name in self._inputs:
            self._copies[name][...] = self._ours[name]
        self._memory[: self._input_bytes].copy_(self._host[: self._input_bytes], non_blocking=True)

    def differences(self) -> list[str]:
        """The places at which the mirror's scheduler output differs from the original."""
        written = slice(self._input_bytes, self._written_bytes)
        self._host[written].copy_(self._memory[written])
        different = [name for name in self._written if not np.array_equal(self._ours[name], self._copies[name])]
        return differences({name: self._ours[name] for name in different}, self._copies)


class Seen:
    """Counts of the storms: the maximum of each in one turn, and the number of each event."""

    def __init__(self) -> None:
        self.most, self.happened, self.steps = Counter[str](), Counter[str](), 0
        self._suspended = 0

    def note(self, limits: Limits, state: State, before: tuple[np.ndarray, np.ndarray], bucket: int) -> None:
        """Count one turn. before: counts and counters before it."""
        counts, requests, rows = state.counts, state.requests, int(state.batch.counts[S.ROWS])
        tokens = int(state.batch.counts[S.TOKENS])
        rose = dict(zip(COUNTER_NAMES, (state.counters - before[1]).tolist(), strict=True))
        most = {
            "rows": rows,
            "fast rows": rows if counts[S.FAST_PATH] else 0,
            "tokens": tokens,
            "running": int(counts[S.RUNNING_COUNT]),
            "waiting": int(counts[S.WAITING_COUNT]),
            "paced": int(counts[S.RUNNING_COUNT]) if state.pace[S.PACE_STEP_NS] and not counts[S.WAITING_COUNT] else 0,
            "ended": rose["requests_cancelled"],
            "accepted": rose["requests_accepted"],
            "request pages": int(requests.num_pages.max()),
            "hit pages": int(requests.hit_tokens.max()) >> limits.page_shift,
            "prompt": int(requests.prompt_length.max()),
            "evicted": rose["evictions"],
            "ring": int(counts[S.RING_TAIL] - counts[S.RING_HEAD]),
        }
        self.most |= {name: max(value, self.most[name]) for name, value in most.items()}
        self.happened.update(rose)
        self.happened["compactions"] += int(counts[S.RING_TAIL] < before[0][S.RING_TAIL])
        self.happened["mixed budget"] += tokens == limits.mixed_tokens
        self.happened["burst budget"] += tokens == limits.burst_step_tokens
        self.happened["largest budget"] += tokens == limits.tokens
        suspended = int(state.suspended.counts[S.ROWS])
        self.happened["cut"] += int(state.batch.counts[S.GROUPS]) > 1
        self.happened["suspended"] += suspended > 0
        self.happened["resumed"] += suspended == 0 and self._suspended > 0
        self.most["suspended rows"], self._suspended = max(suspended, self.most["suspended rows"]), suspended
        self.happened["drained"] += bucket == S.DRAINED
        self.happened["stopped"] += bucket == S.STOPPED
        self.steps += 1

    def missing(self, lanes: int) -> list[str]:
        """The demands of TILES and HAPPENED that were not met."""
        small = [f"{name}: {self.most[name]}" for name, tiles in TILES.items() if self.most[name] <= tiles * lanes]
        return small + [name for name in HAPPENED if not self.happened[name]]


Twin = Callable[[Limits, Mirror], Callable[[int], int]]


def run_storms(
    lanes: int,
    seed: int,
    steps: int,
    turns: int,
    policy: Policy,
    twin: Twin,
    device: str,
    seconds: float,
    enough: Callable[[], bool] = lambda: True,
) -> Seen:
    """Run storms of all shapes in turn, each of `turns` turns. They end after `steps` of each shape if no demand is missing and
    enough() holds, at the latest after four times as many, or when the time is over. seconds: time since the first storm, which
    compiles; CPU time of this process if the device is the CPU, so that a loaded machine runs as many; on a GPU, time of the
    clock.

    twin: makes the turn of the other execution from the limits and a mirror on the device.
    """
    clock = time.process_time if device == "cpu" else time.monotonic
    seen, until = Seen(), math.inf
    shapes = storms(lanes)
    for number, ending in enumerate(itertools.cycle(ENDINGS)):
        for chosen, odds in shapes:
            rounds = seen.steps / (steps * len(shapes))
            if clock() > until or rounds >= 4 or (rounds >= 1 and not seen.missing(lanes) and enough()):
                return seen
            world_seed = 3 * seed + number  # this seed makes the ring of each shape's first world compact often
            world = make_world(world_seed, turns, 16, chosen=chosen, odds=odds)
            mirror = Mirror(world.state, world.queues, device)
            scheduler = side_by_side(world, policy, mirror, twin(world.limits, mirror), seen)
            simulation = Simulation(world_seed, turns, policy, world=world, scheduler=scheduler)
            simulation.ending = ending
            outcome = simulation.run()
            assert outcome.failure is None, outcome.failure
            until = min(until, clock() + seconds)
    return seen


def side_by_side(world: World, policy: Policy, mirror: Mirror, other: Callable[[int], int], seen: Seen) -> Callable[..., int]:
    """A scheduler for Simulation that makes each turn by njit and by the other execution, and compares them."""
    limits, state = world.limits, world.state
    njit = Scheduler(limits, state, policy)
    njit.attach(world.queues)

    def turn(*arguments: Any) -> int:
        now, before = arguments[3], (state.counts.copy(), state.counters.copy())
        mirror.push()
        bucket, others = njit.turn(now), other(now)
        assert bucket == others, f"step {seen.steps}: {bucket} != {others}"
        assert not (different := mirror.differences()), f"step {seen.steps}: {different[:5]}"
        seen.note(limits, state, before, bucket)
        return bucket

    return turn
