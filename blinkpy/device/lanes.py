"""Runs several lanes in plain Python, like a block of GPU threads, as generators that alternate in one thread.

Exactly one lane runs at a time, from one barrier to the next, and the order of the lanes is random in
every such segment. So a result that depends on lane timing differs in some order, and a seed reproduces that order. An example:
one lane reads a word that another lane writes, without a barrier in between.

The code of a lane is the source of the device function with one change: `yield from` before each call of a
collective, or of a function with such a call. A switch of lanes takes less than 1 us; a switch of threads takes 100 us.
"""

import ast
import dis
import pickle
import random
import sys
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from blinkpy.device import portable
from blinkpy.device.tables import map_named_arrays

# Several lanes may write the same value (kv/grammars.unused_grammar). A name may begin with the tables that hold the state.
EQUAL_WRITES = ("scratch.found",)


class LaneRaceError(RuntimeError):
    """Two lanes access a word between two barriers, and one of them writes it."""


class Accesses:
    """The words that the lanes accessed since the last barrier."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.since = self.now = 0  # marks of the accesses since the last barrier's first lane, and of the running lane
        self.several = lanes  # marks a word that several lanes read

    def pass_barrier(self) -> None:
        self.since += self._lanes + 1
        self.several = self.since + self._lanes

    def enter(self, lane: int) -> None:
        """Record that this lane runs now."""
        self.now = self.since + lane

    def watched(self, tree: Any) -> Any:
        """The same NamedTuples, with arrays that record their accesses."""
        return map_named_arrays(lambda name, item: item if isinstance(item, int) else _Watched(self, name, item), tree)

    def race(self, name: str, index: Any, mark: int, what: str) -> LaneRaceError:
        frame = sys._getframe(2)
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        other = "another lane" if mark == self.several else f"lane {mark - self.since}"
        return LaneRaceError(
            f"{where}: lane {self.now - self.since} {what} {name}[{index}] of {other}, without a barrier in between"
        )


class _Watched:
    """An array that records which lanes read and write its words."""

    __slots__ = ("_accesses", "_array", "_equal_writes", "_name", "_read", "_written")

    def __init__(self, accesses: Accesses, name: str, array: Any) -> None:
        self._accesses = accesses
        self._name = name
        self._array = array
        self._equal_writes = f".{name}".endswith(tuple(f".{allowed}" for allowed in EQUAL_WRITES))
        # Marks by index. Marks below `since` no longer count.
        self._read, self._written = dict[Any, int](), dict[Any, int]()

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        accesses = self._accesses
        now = accesses.now
        self._check(index)
        written = self._written.get(index, -1)
        if written >= accesses.since and written != now:
            raise accesses.race(self._name, index, written, "reads what is written:")
        before = self._read.get(index, -1)
        if before != now:
            self._read[index] = accesses.several if before >= accesses.since else now
        return self._array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        accesses = self._accesses
        now = accesses.now
        self._check(index)
        before = self._read.get(index, -1)
        if before >= accesses.since and before != now:
            raise accesses.race(self._name, index, before, "writes what is read:")
        written = self._written.get(index, -1)
        if written >= accesses.since and written != now and not (self._equal_writes and self._array[index] == value):
            raise accesses.race(self._name, index, written, "writes what is written:")
        self._written[index] = now
        self._array[index] = value

    def _check(self, index: Any) -> None:
        if min(index) < 0 if isinstance(index, tuple) else index < 0:
            raise IndexError(f"{self._name}[{index}] is out of range")


ORDERS = 256  # number of lane orders from which a team draws
WORD = 1 << 63  # results of collectives are at least -WORD and less than WORD
Lane = Generator[tuple[str, int], list[int], Any]  # yields each collective with its value, and receives all values


class LanesDivergedError(RuntimeError):
    """Lanes wait at different barriers, or return different results."""


class Team:
    """`lanes` lanes that run device functions together.

    seed: random seed of the lanes' order.
    races: detect races.
    """

    def __init__(self, lanes: int, seed: int = 0, *, races: bool = False) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, not {lanes}")
        self.lanes = lanes
        self._seed = seed
        self._runs = 0
        draw = random.Random(seed)
        self._accesses = Accesses(lanes) if races else None
        self._orders = [draw.sample(range(lanes), lanes) for _ in range(ORDERS)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call function(*arguments, lane, lanes) in every lane. Returns the lanes' results in order. Raises
        the exception of the first failing lane.

        The orders depend only on the seed and the number of the call.
        """
        draw, self._runs = random.Random(self._seed << 32 | self._runs), self._runs + 1
        waits = in_lane(function)
        if waits is None:
            raise ValueError(f"{function.__name__} has no barrier")
        accesses = self._accesses
        if accesses:
            arguments = tuple(accesses.watched(argument) if isinstance(argument, tuple) else argument for argument in arguments)
        running = [waits(*arguments, lane, self.lanes) for lane in range(self.lanes)]
        values: Any = None
        while True:
            results, met = [None] * self.lanes, list[Any](running)
            ended = 0
            if accesses:
                accesses.pass_barrier()
            for lane in draw.choice(self._orders):
                if accesses:
                    accesses.enter(lane)
                try:
                    met[lane] = running[lane].send(values)
                except StopIteration as end:
                    results[lane] = end.value
                    ended += 1
            if ended == self.lanes:
                return results
            if ended:
                raise LanesDivergedError(f"{ended} of {self.lanes} lanes returned, but the others still wait")
            collectives, values = zip(*met, strict=True)
            if len(set(collectives)) > 1:
                raise LanesDivergedError(f"lanes wait in different collectives: {', '.join(sorted(set(collectives)))}")


def in_lanes(turn: Callable[..., int], lanes: int, seed: int = 0, *, races: bool = False) -> Callable[..., int]:
    """A device function run by a team, which replaces its last two arguments, lane and lanes. races: see
    Team.
    """
    team = Team(lanes, seed, races=races)

    def run(*arguments: Any) -> int:
        results = team.run(turn, *arguments[:-2])
        if len(set(results)) > 1:
            raise LanesDivergedError(f"lanes return different results: {results}")
        result: int = results[0]
        return result

    return run


# ---- the code of a lane -------------------------------------------------------------------------------------------------


def _barrier(lanes: int) -> Lane:
    yield "barrier", 0


def _block_scan(value: int, lane: int, lanes: int) -> Lane:
    values = yield "block_scan", value
    return sum(values[:lane]), _word(sum(values))


def _block_sum(value: int, lane: int, lanes: int) -> Lane:
    return _word(sum((yield "block_sum", value)))


def _block_max(value: int, lane: int, lanes: int) -> Lane:
    return _word(max((yield "block_max", value)))


def _word(value: int) -> int:
    """Return the value. Raises OverflowError if it does not fit into 64 bits, because a GPU would wrap it."""
    if not -WORD <= value < WORD:
        raise OverflowError(f"{value} has more than 64 bits")
    return value


COLLECTIVES: dict[Any, Callable[..., Lane]] = {
    portable.barrier: _barrier,
    portable.block_scan: _block_scan,
    portable.block_sum: _block_sum,
    portable.block_max: _block_max,
}


@cache
def in_lane(function: Any) -> Callable[..., Lane] | None:
    """A device function as a generator function, or None if it calls no collective."""
    if function in COLLECTIVES:
        return COLLECTIVES[function]
    named = _named(function)
    waiting = {name: waits for name, value in named.items() if isinstance(value, FunctionType) and (waits := in_lane(value))}
    if not waiting:
        return None
    free = {name: named[name] for name in function.__code__.co_freevars} | waiting
    definition = pickle.loads(pickle.dumps(definition_of(function)))  # a copy, five times as fast as copy.deepcopy
    # An empty statement lets the code start on the original line, by which coverage identifies it.
    nothing = ast.parse("lambda function: function", mode="eval").body
    definition.decorator_list = [ast.copy_location(nothing, old) for old in definition.decorator_list[:1]]
    _YieldFrom(waiting).visit(definition)
    maker = ast.parse(f"def make({', '.join(free)}):\n    return {definition.name}")
    maker.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
    made: dict[str, Any] = {}
    exec(compile(maker, function.__code__.co_filename, "exec"), function.__globals__, made)
    lane: Callable[..., Lane] = made["make"](**free)
    return lane


def _named(function: FunctionType) -> dict[str, Any]:
    """The global names and free variables of a function's code."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    loaded = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"} & set(function.__globals__)
    return {name: function.__globals__[name] for name in loaded} | {name: cell.cell_contents for name, cell in cells.items()}


def definition_of(function: FunctionType) -> ast.FunctionDef:
    """The definition of a function in its module's source. The node is shared, so copy it before a change.
    Raises ValueError or OSError if it is not found.
    """
    code = function.__code__
    get_source = getattr(function.__globals__.get("__loader__"), "get_source", None)  # pytest's loader has no get_source
    text = get_source(function.__globals__["__name__"]) if get_source else Path(code.co_filename).read_text()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if code.co_firstlineno == min([node.lineno, *(line.lineno for line in node.decorator_list)]):
                return node
    raise ValueError(f"{code.co_name} was not found in the source of its module")


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class _YieldFrom(ast.NodeTransformer):
    """Adds `yield from` before the calls of some names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        waits = isinstance(node.func, ast.Name) and node.func.id in self._names
        return ast.copy_location(ast.YieldFrom(node), node) if waits else node
