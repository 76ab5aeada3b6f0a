"""Which divisors of a policy's source can be 0: the least value of an expression, as far as its form shows it."""

import ast
import math
from collections.abc import Iterator

# The least value of each field of a request; -inf for any other expression.
LEAST = {"prompt_length": 1, "max_tokens": 1}
LEAST |= dict.fromkeys(("arrival", "arrival_us", "generated", "preemptions", "pair", "tenant"), 0)
LEAST |= dict.fromkeys(("best_effort", "tenant_service"), 0)
DIVISIONS = (ast.FloorDiv, ast.Mod, ast.Div)


def doubtful_divisors(tree: ast.Module, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """The divisors in a function of a module that may be 0."""
    names = _constants(tree.body)
    own = _constants(function.body)
    stored = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names = {name: value for name, value in names.items() if name not in stored}
    names |= {name: value for name, value in own.items() if stored.count(name) == 1}
    for parameter in function.args.args:
        names.pop(parameter.arg, None)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, DIVISIONS):
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
            if not _never_zero(divisor, names):
                yield divisor


def _constants(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Names that a block assigns once, and what they are then."""
    simple = [node for node in body if isinstance(node, ast.Assign) and len(node.targets) == 1]
    pairs = [(node.targets[0].id, node.value) for node in simple if isinstance(node.targets[0], ast.Name)]
    names = [name for name, _ in pairs]
    return {name: value for name, value in pairs if names.count(name) == 1}


def _never_zero(node: ast.expr, names: dict[str, ast.expr]) -> bool:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    return _least(node.operand if negative else node, names) > 0  # type: ignore[attr-defined]


def _least(node: ast.expr, names: dict[str, ast.expr]) -> float:
    """A lower bound of an expression's value."""

    def least(part: ast.expr) -> float:
        return _least(part, names)

    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Attribute(attr=field):
            return LEAST.get(field, -math.inf)
        case ast.Name(id=name) if name in names:
            return _least(names[name], {other: value for other, value in names.items() if other != name})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return least(left) + least(right)
        case ast.BinOp(left=left, op=ast.Mult() | ast.LShift() | ast.Pow() as op, right=right):
            a, b = least(left), least(right)
            if min(a, b) < 0:
                return -math.inf
            return a * b if isinstance(op, ast.Mult) else a
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.RShift() | ast.Mod(), right=right):
            return 0 if least(left) >= 0 and least(right) >= 0 else -math.inf
        case ast.IfExp(body=body, orelse=other):
            return min(least(body), least(other))
        case ast.Call(func=ast.Name(id="max"), args=parts) if parts:
            return max(map(least, parts))
        case ast.Call(func=ast.Name(id="min"), args=parts) if parts:
            return min(map(least, parts))
        case ast.Call(func=ast.Name(id="float"), args=[part]):
            return least(part)
        case ast.Call(func=ast.Name(id="abs")):
            return 0
    return -math.inf
