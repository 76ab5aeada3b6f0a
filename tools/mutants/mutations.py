"""Mutants by rule: every small change to a module's functions that a rule below makes.

These stay unchanged: module-level constants, which both sides of a queue share, annotations, docstrings,
and calls of `expect` and `prefetch`, which have no effect in correct code.
"""

import ast
import contextlib
import copy
import hashlib
import importlib
import io
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from blinkpy.sources import PACKAGE
from mutants.meanings import Change, constants_of, meaning_changes

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
WEAKER = {"store_release": "store_relaxed", "load_acquire": "load_relaxed"}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
COMMUTATIVE = {"min", "max"}
CHECKS = {"expect", "prefetch"}
CONTEXT = {"limits", "queues", "state", "requests", "pages", "counts", "lane", "lanes", "self"}  # arguments of every phase
RELAXED_IMPORT = "\nfrom blinkpy.device.portable import load_relaxed, store_relaxed  # noqa\n"


class Mutant(NamedTuple):
    """One change: bytes [start, end) of a module's file become `after`.

    function: qualified name.
    nth: index among equal changes of the same function.
    text: digest of the function's text, without the change.
    """

    module: str
    path: Path
    function: str
    rule: str
    line: int
    start: int
    end: int
    before: str
    after: str
    nth: int = 0
    text: str = ""

    @property
    def source(self) -> str:
        """The module's text with the change."""
        text = self.path.read_bytes()
        changed = (text[: self.start] + self.after.encode() + text[self.end :]).decode()
        return changed + RELAXED_IMPORT if self.rule == "weaker atomic" else changed

    @property
    def file(self) -> str:
        """Below the package."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def name(self) -> str:
        """A name that stays the same while the function contains this piece of text."""
        return f"{self.file}::{self.function}: {one_line(self.before)} -> {one_line(self.after)} [{self.nth}]"

    @property
    def id(self) -> str:
        return short_digest(f"{self.rule} {self.name}".encode())

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.rule}\n  - {one_line(self.before)}\n  + {one_line(self.after)}"


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def one_line(text: str) -> str:
    """A piece of code without comments, so that names outlive their changes."""
    if "#" in text:
        with contextlib.suppress(tokenize.TokenError, IndentationError):
            tokens = list(tokenize.generate_tokens(io.StringIO(f"({text}\n)").readline))
            lines = text.split("\n")
            for token in reversed([token for token in tokens if token.type == tokenize.COMMENT]):
                row, column = token.start[0] - 1, token.start[1] - (token.start[0] == 1)
                lines[row] = lines[row][:column]
            text = "\n".join(lines)
    return " ".join(text.split())


def mutants_of(path: Path, meaning: bool = False) -> list[Mutant]:
    """All mutants of a file, in the order of its text. meaning: use the rules of mutants.meanings instead of this
    module's."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    tree = ast.parse(text)
    constants = constants_of(tree)
    for function, name in _functions(tree):
        own = short_digest(text[starts[function.lineno - 1] : starts[function.end_lineno or 0]])
        for rule, first, last, after in _meanings(function, constants) if meaning else _changes(function):
            start = starts[first.lineno - 1] + first.col_offset
            end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
            before = text[start:end].decode()
            nth = seen[name, before, after] = seen.get((name, before, after), -1) + 1
            mutant = Mutant(module, path, name, rule, first.lineno, start, end, before, after, nth, own)
            if one_line(before) != one_line(after):
                made.append(mutant)
    return sorted(made, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def thinned(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """At most one mutant for each line and rule, chosen by a hash of seed and name. The same tests nearly
    always find the others.

    Petrovic and Ivankovic do so for each line (State of Mutation Testing at Google, 2018).
    """
    drawn: dict[tuple[Path, int, str], Mutant] = {}
    for mutant in sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()):
        drawn.setdefault((mutant.path, mutant.line, mutant.rule), mutant)
    kept = set(drawn.values())
    return [mutant for mutant in mutants if mutant in kept]


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Outermost functions and methods with their qualified names; those inside belong to them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner, f"{node.name}.{inner.name}"


def _changes(function: ast.AST) -> Iterator[Change]:
    for node in _code(function):
        yield from _expression(node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                yield from _statements([s for s in statements if isinstance(s, ast.stmt) and not _is_check(s)])


def _meanings(function: ast.AST, constants: tuple[str, ...]) -> Iterator[Change]:
    for node in _code(function):
        yield from meaning_changes(node, constants)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, decorators, docstrings, and no checks."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_check(child) and not isinstance(child, ast.JoinedStr):
                yield from _code(child)


def _is_check(node: ast.AST) -> bool:
    """Whether a statement checks or documents, and does nothing else."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in CHECKS
    return False


# ---- expressions ---------------------------------------------------------------------------------------------------------


def _expression(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                yield _replaced("comparison", node, "ops", [*node.ops[:i], COMPARISONS[type(operator)](), *node.ops[i + 1 :]])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield _replaced("operator", node, "op", OPERATORS[type(operator)]())
            if isinstance(node.right, ast.Constant) and node.right.value == 1 and isinstance(operator, ast.Add | ast.Sub):
                yield "off by one", node, node, f"({ast.unparse(node.left)})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "off by one", node, node, str(value + 1)
        case ast.Constant(value=bool(value)):
            yield "off by one", node, node, str(not value)
        case ast.BoolOp():
            yield _replaced("and, or", node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
            for operand in node.values:
                yield _replaced("dropped condition", node, "values", [v for v in node.values if v is not operand])
        case ast.UnaryOp(op=ast.Not()):
            yield "dropped condition", node, node, f"({ast.unparse(node.operand)})"
        case ast.If() | ast.IfExp():
            yield from (("dropped branch", node.test, node.test, constant) for constant in ("True", "False"))
        case ast.While():
            yield "dropped branch", node.test, node.test, "False"
        case ast.Call():
            yield from _call(node)
        case ast.Attribute(ctx=ast.Load()):
            yield from _neighbour(node, node.attr)
            owner = ast.unparse(node.value)
            other = same_fields().get((owner.rpartition(".")[2], node.attr))
            if other:
                yield "wrong field", node, node, f"{owner}.{other}"
        case ast.Name(ctx=ast.Load()):
            yield from _neighbour(node, node.id)


def _replaced(rule: str, node: ast.expr, field: str, value: object) -> Change:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return rule, node, node, f"({ast.unparse(changed)})"


def _call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name):
        name = node.func.id
        if name in WEAKER:
            yield "weaker atomic", node.func, node.func, WEAKER[name]
        if name in OPPOSITES:
            yield "operator", node.func, node.func, OPPOSITES[name]
        if name in COMMUTATIVE:
            return
    for first, second in pairwise(node.args):
        names = {ast.unparse(first), ast.unparse(second)}
        if not names & CONTEXT and len(names) == 2 and not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            swapped = [second if a is first else first if a is second else a for a in node.args]
            yield _replaced("swapped arguments", node, "args", swapped)


def _neighbour(node: ast.expr, name: str) -> Iterator[Change]:
    if name in neighbours():
        yield "neighbour constant", node, node, str(neighbours()[name])


# ---- statements ----------------------------------------------------------------------------------------------------------


def _statements(block: list[ast.stmt]) -> Iterator[Change]:
    for statement in block:
        match statement:
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
                yield "dropped statement", statement, statement, "pass"
            case ast.Expr() | ast.Raise() | ast.Continue() | ast.Break():
                yield "dropped statement", statement, statement, "pass"
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)) if not all(map(_is_alias, values)):
                for i, (a, b) in enumerate(pairwise(values)):
                    if ast.unparse(a) == ast.unparse(b):
                        continue
                    swapped = [*values[:i], b, a, *values[i + 2 :]]
                    text = ", ".join(ast.unparse(value) for value in swapped)
                    yield "swapped fields", statement.value, statement.value, f"({text})"
    for first, second in pairwise(block):
        if _depends(first, second):
            indent = " " * first.col_offset
            yield "moved statement", first, second, f"{ast.unparse(second)}\n{indent}{ast.unparse(first)}"


def _is_alias(value: ast.expr) -> bool:
    """state.requests and the like: short names at the top of a function."""
    return isinstance(value, ast.Attribute) and ast.unparse(value.value) in CONTEXT


def _depends(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether the order of two simple statements may matter.

    It may if one names what the other writes, or if one is a store or a barrier and the other accesses
    memory. Relaxed stores have no order.
    """
    simple = ast.Assign | ast.AugAssign | ast.Expr
    if not isinstance(first, simple) or not isinstance(second, simple):
        return False
    for one, other in ((first, second), (second, first)):
        if any(target in ast.unparse(other) for target in _written(one)):
            return True
    if all(ast.unparse(s).startswith("store_relaxed(") for s in (first, second)):
        return False
    touch = [any(isinstance(n, ast.Call | ast.Attribute | ast.Subscript) for n in ast.walk(s)) for s in (first, second)]
    return all(touch) and any(isinstance(s, ast.Expr) for s in (first, second))


def _written(statement: ast.stmt) -> list[str]:
    """The memory places that a statement writes, as text. Names don't count: reading one too early is an
    error.
    """
    targets = statement.targets if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    listed = targets if isinstance(targets, list) else [targets] if targets else []
    flat = [e for t in listed for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [ast.unparse(target) for target in flat if isinstance(target, ast.Attribute | ast.Subscript)]


# ---- neighbouring names ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def neighbours() -> dict[str, int]:
    """For each constant of the package's groups, the value of the next constant. A group is a tuple
    assignment or consecutive lines.
    """
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        groups: list[list[str]] = []
        last = 0
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=names)]):
                    groups.append([name.id for name in names if isinstance(name, ast.Name)])
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int())):
                    if groups and node.lineno == last + 1:
                        groups[-1].append(name)
                    else:
                        groups.append([name])
            last = node.end_lineno or 0
        if any(len(group) > 1 for group in groups):
            module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            for group in groups:
                for name, other in zip(group, group[1:] + group[:1], strict=True):
                    value, own = getattr(module, other), getattr(module, name)
                    if name.isupper() and isinstance(value, int) and value != own and name not in found:
                        found[name] = value
    return found


@lru_cache(maxsize=1)
def same_fields() -> dict[tuple[str, str], str]:
    """For each field of the state's and the limits' tuples, as ("requests", "computed"), the next one with the same type."""
    found: dict[tuple[str, str], str] = {}
    for file in ("kv/state.py", "kv/limits.py"):
        for node in ast.parse((PACKAGE / file).read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                kinds = {
                    field.target.id: ast.unparse(field.annotation)
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
                for name, kind in kinds.items():
                    alike = [other for other, its in kinds.items() if its == kind]
                    after = alike[(alike.index(name) + 1) % len(alike)]
                    if after != name:
                        found[node.name.lower(), name] = after
    return found
