"""`make decisions`: the conditions of the oracle's rules that random worlds decide, and the conditions that they never do.

    make decisions ARGS='--worlds 2000 --processes 2'             which sides are decided, and how rarely
    make decisions ARGS='--worlds 2000 --processes 2 --write'     and store few worlds that decide them all
    make decisions ARGS='--check'                                 run the stored worlds

Each condition of the rules is split into its operands. An operand decides if it is evaluated, as Python evaluates `and` and
`or` from the left. It has two sides, true and false. A comparison by order has three: less, equal, greater. `min` and `max`
have a side for each argument, if no other argument equals the result. A side that no world reaches is judged by nothing: a
scheduler that is wrong there agrees with the oracle.

tests/support/deciding_worlds.py has worlds that together reach every side but those of NEVER, each with a reason. `make test`
runs them. Another draw of the simulator makes other worlds: --write then chooses again.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "support" / "deciding_worlds.py"
BEGIN = "WORLDS: tuple[tuple[int, str], ...] = (\n"
KINDS = ("even", "uneven", "hostile")
PACKAGE = "blinkpy.verify.oracle"
UNRECORDED = ("second_opinion", "policy_rules")  # comparisons, and the policies' language, which has other tests
TURNS = 600  # stormy turns of a world
ORDERS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
RECORD = "_decided"  # the name of Record.__call__ in the instrumented modules


class Side(NamedTuple):
    """One side of an operand. function: in which it stands; text: its source; at: counts equal texts in a function."""

    module: str
    function: str
    text: str
    at: int
    side: str

    def __str__(self) -> str:
        again = f" (number {self.at + 1})" if self.at else ""
        return f"{self.module}.{self.function}: `{self.text}`{again} is never {self.side}"


class Record:
    """The sides of the instrumented modules, and how often each decided."""

    def __init__(self) -> None:
        self.sides: list[tuple[Side, ...]] = []
        self.counts: Counter[Side] = Counter()

    def truth(self, place: int, value: Any) -> Any:
        self.counts[self.sides[place][not value]] += 1
        return value

    def order(self, place: int, left: Any, right: Any) -> tuple[Any, Any]:
        self.counts[self.sides[place][0 if left < right else 1 if left == right else 2]] += 1
        return left, right

    def extreme(self, place: int, choose: Any, *values: Any) -> Any:
        result = choose(*values)
        if values.count(result) == 1:
            self.counts[self.sides[place][values.index(result)]] += 1
        return result


class Instrument(ast.NodeTransformer):
    """Rewrites the conditions of a module, so that a Record counts their sides."""

    def __init__(self, module: str, record: Record) -> None:
        self.module, self.record = module, record
        self._function, self._seen = "", Counter[tuple[str, str]]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._function = self._function, node.name
        node.body = [self.visit(statement) for statement in node.body]
        self._function = outer
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._tested(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._tested(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._tested(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        conditions = [self._operand(each) for each in node.ifs]
        node.ifs = []
        self.generic_visit(node)
        node.ifs = conditions
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """The last operand of a value decides only if it is a condition itself."""
        *first, last = node.values
        condition = isinstance(last, ast.BoolOp | ast.Compare | ast.UnaryOp)
        node.values = [*map(self._operand, first), self._operand(last) if condition else self.visit(last)]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._operand(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = not node.keywords and not any(isinstance(each, ast.Starred) for each in node.args)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1 and plain:
            place = self._place(node, [f"its argument {i + 1} alone" for i in range(len(node.args))])
            return self._call("extreme", node, ast.Constant(place), node.func, *node.args)
        return node

    def _tested(self, node: Any) -> ast.AST:
        test = self._operand(node.test)
        node.test = ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        return node

    def _operand(self, node: ast.expr) -> ast.expr:
        """`node` with the operands of its `and`, `or` and `not` recorded."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._operand(each) for each in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._operand(node.operand)
            return node
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in ORDERS:
            place = self._place(node, ["less", "equal", "greater"])
            self.generic_visit(node)
            pair = self._call("order", node, ast.Constant(place), node.left, node.comparators[0])
            return self._compared(pair, node)
        place = self._place(node, ["true", "false"])
        self.generic_visit(node)
        return self._call("truth", node, ast.Constant(place), node)

    def _compared(self, pair: ast.expr, node: ast.Compare) -> ast.expr:
        """The comparison of the two values of `pair`, each of which was evaluated once."""
        compare = ast.parse(f"(lambda pair: pair[0] {ORDERS[type(node.ops[0])]} pair[1])(0)", mode="eval").body
        assert isinstance(compare, ast.Call)
        compare.args = [pair]
        return ast.fix_missing_locations(ast.copy_location(compare, node))

    def _call(self, method: str, node: ast.expr, *arguments: ast.expr) -> ast.expr:
        function = ast.Attribute(ast.Name(RECORD, ast.Load()), method, ast.Load())
        return ast.fix_missing_locations(ast.copy_location(ast.Call(function, list(arguments), []), node))

    def _place(self, node: ast.expr, sides: list[str]) -> int:
        text = ast.unparse(node)
        at = self._seen[self._function, text]
        self._seen[self._function, text] += 1
        self.record.sides.append(tuple(Side(self.module, self._function, text, at, side) for side in sides))
        return len(self.record.sides) - 1


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of the oracle with its conditions recorded; it leaves no bytecode behind."""

    def __init__(self, name: str, path: str, record: Record) -> None:
        super().__init__(name, path)
        self.record = record

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text())
        return compile(Instrument(fullname.rpartition(".")[2], self.record).visit(tree), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, RECORD, self.record)
        super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, record: Record) -> None:
        self.record = record

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(PACKAGE + ".") or name.rpartition(".")[2] in UNRECORDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.origin:
            spec.loader = Loader(name, spec.origin, self.record)
        return spec


RECORDED = Record()


def recorded_oracle() -> Record:
    """Import the oracle with its conditions recorded. To be called before anything imports it.

    Raises RuntimeError if it is imported already.
    """
    if any(name.startswith(PACKAGE + ".") for name in sys.modules):
        raise RuntimeError(f"{PACKAGE} is imported already: its conditions cannot be recorded")
    sys.meta_path.insert(0, Finder(RECORDED))
    for path in sorted((ROOT / PACKAGE.replace(".", "/")).glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"{PACKAGE}.{path.stem}")
    return RECORDED


def sides_of(seed: int, kind: str, turns: int = TURNS) -> Counter[Side]:
    """Simulate one world under the oracle.

    kind: one of KINDS: of make_world, of uneven_world, or of make_world with a hostile front end.
    Returns how often each side decided. Raises AssertionError for a violation.
    """
    from blinkpy.scheduler.policies import SHIPPED
    from blinkpy.verify.sim.simulation import simulate
    from blinkpy.verify.sim.world import uneven_world

    RECORDED.counts = Counter()
    policies, world = list(SHIPPED.values()), uneven_world(seed, turns) if kind == "uneven" else None
    outcome = simulate(seed, turns, policies[seed % len(policies)], oracle=True, world=world, hostile=kind == "hostile")
    assert not outcome.failure, outcome.failure
    return RECORDED.counts


def fewest(found: dict[tuple[int, str], set[Side]]) -> list[tuple[int, str]]:
    """Few worlds that reach every side that all of them reach: each time a world with most of the missing sides."""
    left, chosen = set().union(*found.values()), list[tuple[int, str]]()
    while left:
        chosen.append(max(found, key=lambda world: len(found[world] & left)))
        left -= found[chosen[-1]]
    return sorted(chosen)


def undecided(record: Record, total: Counter[Side]) -> list[Side]:
    return [side for sides in record.sides for side in sides if not total[side]]


def check(record: Record) -> int:
    """Run the stored worlds. Returns 1 if a side is neither reached nor in NEVER, or in both."""
    from support.deciding_worlds import NEVER, WORLDS

    total = Counter[Side]()
    for seed, kind in WORLDS:
        total += sides_of(seed, kind)
    never, known = {str(side) for side in undecided(record, total)}, {side for side, _ in NEVER}
    for side in sorted(never ^ known):
        print(side if side in never else f"NEVER has a side that is reached, or that does not exist: {side}")
    print(f"{len(total)} sides decided in {len(WORLDS)} worlds; {len(never)} never")
    return int(never != known)


def write(worlds: Iterable[tuple[int, str]]) -> None:
    head = FILE.read_text().partition(BEGIN)[0]
    lines = "".join(f'    ({seed}, "{kind}"),\n' for seed, kind in worlds)
    FILE.write_text(f"{head}{BEGIN}{lines})\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m decisions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000, help="worlds to simulate, of each kind in turn [1000]")
    parser.add_argument("--seed", type=int, default=1, help="first seed [1]")
    parser.add_argument("--processes", type=int, default=1, help="among which the worlds are divided [1]")
    parser.add_argument("--write", action="store_true", help=f"store the fewest worlds with all sides in {FILE.name}")
    parser.add_argument("--check", action="store_true", help="only run the stored worlds, and compare with NEVER")
    arguments = parser.parse_args()
    record = recorded_oracle()
    if arguments.check:
        return check(record)
    worlds = [(arguments.seed + i // len(KINDS), KINDS[i % len(KINDS)]) for i in range(arguments.worlds)]
    found, total = dict[tuple[int, str], set[Side]](), Counter[Side]()
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("fork")) as pool:
        for i, (world, counts) in enumerate(zip(worlds, pool.map(partial(_starred, sides_of), worlds, chunksize=8), strict=True)):
            found[world] = set(counts)
            total += counts
            if i % 100 == 99:
                print(f"{i + 1} of {len(worlds)} worlds: {len(total)} sides", flush=True)
    never = undecided(record, total)
    print(f"{len(total)} of {len(total) + len(never)} sides decided; never:")
    print("\n".join(map(str, never)))
    rare = [side for side, count in total.items() if count < 10]
    print("fewer than ten times:", *rare, sep="\n  ")
    if arguments.write:
        write(fewest(found))
    return 0


def _starred(function: Any, arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


if __name__ == "__main__":
    raise SystemExit(main())
