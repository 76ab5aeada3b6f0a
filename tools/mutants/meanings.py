"""Mutants of meaning: changes that are valid code with another meaning, as people make them by mistake.

A field becomes its sibling of the same type, a limit its sibling's limit, the largest the first, a sum one of its parts. Seconds
become milliseconds, and a default becomes another. A value stays as it was first, one of two writes is dropped, and a
release happens on one path only.
"""

import ast
import copy
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from blinkpy.sources import PACKAGE

Node = ast.expr | ast.stmt
Change = tuple[str, Node, Node, str]  # rule, first and last node that are replaced, new text
UNITS = ("_s", "_ms", "_us", "_ns", "_bytes", "_mib", "_tokens")
FIRST = "next(iter({}))"


def meaning_changes(node: ast.AST, constants: tuple[str, ...]) -> Iterator[Change]:
    """The changes of one node. constants: names in capitals of its file."""
    match node:
        case ast.Attribute(ctx=ast.Load(), attr=name):
            if name in siblings():
                yield "sibling field", node, node, f"{ast.unparse(node.value)}.{siblings()[name]}"
            if name.endswith(UNITS):
                yield "another unit", node, node, f"(1000 * {ast.unparse(node)})"
        case ast.Name(ctx=ast.Load(), id=name):
            if name.isupper() and (other := _sibling_limit(name, constants)):
                yield "limit of a sibling", node, node, other
            if name.endswith(UNITS):
                yield "another unit", node, node, f"(1000 * {name})"
        case ast.Call():
            yield from _of_call(node)
        case ast.IfExp(test=ast.Compare(ops=[ast.Is() | ast.IsNot() as is_none], comparators=[ast.Constant(value=None)])):
            given = node.body if isinstance(is_none, ast.IsNot) else node.orelse
            yield "another default", node, node, f"({ast.unparse(given)})"
        case ast.BoolOp(op=ast.Or(), values=[first, ast.Constant() | ast.Tuple()]):
            yield "another default", node, node, f"({ast.unparse(first)})"
        case ast.Subscript(ctx=ast.Load(), slice=ast.Constant(value=0)):
            yield "first for last", node, node, f"{ast.unparse(node.value)}[-1]"
        case ast.Assign() | ast.Try():
            yield from _of_statement(node)


def _of_call(node: ast.Call) -> Iterator[Change]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    inside = ", ".join(map(ast.unparse, node.args))
    if called in ("max", "min") and len(node.args) == 1:
        yield "first for largest", node, node, FIRST.format(inside)
    elif called == "sorted":
        yield "first for largest", node, node, f"list({ast.unparse(node.args[0])})"
    elif called == "sum" and len(node.args) == 1:
        yield "one for all", node, node, f"next(iter({inside}), 0)"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("strip", "lstrip", "rstrip", "lower", "copy", "clone"):
        yield "dropped conversion", node, node, ast.unparse(node.func.value)
    for first, second in pairwise(node.keywords):
        plain = ast.Name | ast.Attribute
        if first.arg and second.arg and isinstance(first.value, plain) and isinstance(second.value, plain):
            changed = copy.deepcopy(node)
            at = node.keywords.index(first)
            one, other = changed.keywords[at], changed.keywords[at + 1]
            one.value, other.value = other.value, one.value
            if ast.unparse(one.value) != ast.unparse(other.value):
                yield "sibling argument", node, node, ast.unparse(changed)


def _of_statement(node: ast.Assign | ast.Try) -> Iterator[Change]:
    indent = " " * node.col_offset
    if isinstance(node, ast.Try):
        if node.finalbody:
            changed = copy.copy(node)
            changed.body, changed.finalbody = [*node.body, *node.finalbody], [ast.Pass()]
            yield "on one path only", node, node, ast.unparse(changed).replace("\n", f"\n{indent}")
        return
    targets = node.targets
    for target in targets if len(targets) > 1 else ():
        kept = copy.copy(node)
        kept.targets = [other for other in targets if other is not target]
        yield "one of two writes", node, node, ast.unparse(kept)
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name) as target]):
            value = ast.unparse(node.value)
            yield "stale value", node, node, f"{ast.unparse(target)} = getattr(self, {name!r}, {value})"
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            for at in range(len(names)):
                if isinstance(names[at], ast.Attribute | ast.Subscript):
                    rest = [(n, v) for i, (n, v) in enumerate(zip(names, values, strict=True)) if i != at]
                    text = f"{', '.join(ast.unparse(n) for n, _ in rest)} = {', '.join(ast.unparse(v) for _, v in rest)}"
                    yield "one of two writes", node, node, text if rest else "pass"


def _sibling_limit(name: str, constants: tuple[str, ...]) -> str:
    """Another constant of the file with the same first word, such as MOST_ or MAX_; "" if there is no such constant."""
    word = name.partition("_")[0]
    alike = [other for other in constants if other.partition("_")[0] == word]
    other = alike[(alike.index(name) + 1) % len(alike)] if name in alike else name
    return "" if other == name else other


def constants_of(tree: ast.Module) -> tuple[str, ...]:
    """Names in capitals that a file uses, in alphabetical order."""
    return tuple(sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.isupper()}))


@lru_cache(maxsize=1)
def siblings() -> dict[str, str]:
    """For each field of a class of the package, the next field of this class with the same type. Names in several
    classes are excluded, since without types their class is unknown."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
                kinds = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
                for name, kind in kinds.items():
                    alike = [other for other, its in kinds.items() if its == kind]
                    found.setdefault(name, set()).add(alike[(alike.index(name) + 1) % len(alike)])
    return {name: other for name, others in found.items() for other in others if len(others) == 1 and other != name}
