"""Expressions of a policy: kinds and bounds of their values, and the guarded code for them."""

import ast
import builtins
import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher

from blinkpy.scheduler import guarded_arithmetic as G
from blinkpy.scheduler.guarded_arithmetic import Place
from blinkpy.scheduler.policy_key import LIBRARIES
from blinkpy.scheduler.policy_program import A_KIND, OWN, Kind, PolicyError, Program, Value

GUARDS = [ast.Name(f"{OWN}faults", ast.Load()), ast.Name(f"{OWN}at", ast.Load())]

INTEGER_OPERATORS: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: G.add,
    ast.Sub: G.subtract,
    ast.Mult: G.multiply,
    ast.FloorDiv: G.floor_divide,
    ast.Mod: G.modulo,
    ast.Pow: G.power,
    ast.LShift: G.shift_left,
    ast.RShift: G.shift_right,
}
BIT_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor)
DIVISIONS = (ast.FloorDiv, ast.Mod)
COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
TO_INTEGER: tuple[Any, ...] = (int, np.int64, types.int64)
FLOATING: tuple[Any, ...] = (float, np.float64, types.float64)
CHOICES: tuple[tuple[tuple[Any, ...], Callable[..., Any]], ...] = (
    ((min, np.minimum), G.smaller),
    ((max, np.maximum), G.larger),
)
CALLABLE = "min, max, abs, int, bool, len, and functions of your own"
MUTABLE = (list, dict, set, bytearray, np.ndarray)
LEAST: dict[str, float] = {"prompt_length": 1, "max_tokens": 1, "priority": -math.inf}
"""The minimum of a request's field; 0 for fields without an entry."""
SCALED = "a policy computes with integers: scale it, as in `x * 3 // 2` for `x * 1.5`, and write `//` for `/`"

STATELESS = "(a policy keeps no state: the same request must always get the same rank)"
NOT_IN_A_POLICY: dict[str, tuple[type[ast.AST], ...]] = {
    "a dictionary": (ast.Dict, ast.DictComp),
    "a set": (ast.Set, ast.SetComp),
    "a list": (ast.List, ast.ListComp),
    "a generator": (ast.GeneratorExp, ast.Yield, ast.YieldFrom),
    "await": (ast.Await,),
    "a string": (ast.JoinedStr,),
    "try": (ast.Try, ast.TryStar),
    "with": (ast.With,),
    "raise": (ast.Raise,),
    "assert": (ast.Assert,),
    "an import inside the function": (ast.Import, ast.ImportFrom),
    "a class": (ast.ClassDef,),
    "a function inside the function": (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    "match": (ast.Match,),
    "del": (ast.Delete,),
    ":=": (ast.NamedExpr,),
    f"global {STATELESS}": (ast.Global,),
    f"nonlocal {STATELESS}": (ast.Nonlocal,),
}


KEPT = "the compiled rank keeps the value of the engine's start"
LAST = "such a request would be served last"


class ExpressionWriter:
    """Rewrites the expressions of a function."""

    def __init__(self, program: Program, function: FunctionType, source: ast.FunctionDef, kinds: tuple[Kind, ...]):
        self.program = program
        self.function = function
        self.source = source
        self.file = function.__code__.co_filename
        self.parameters = [argument.arg for argument in (*source.args.posonlyargs, *source.args.args)]
        self.kinds: dict[str, Kind] = dict(zip(self.parameters, kinds, strict=False))  # of all local names
        self._given = len(kinds)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell.cell_contents for name, cell in cells}
        self.local = set(function.__code__.co_varnames)
        stores = [each.id for each in ast.walk(source) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        self._once = {name for name in stores if stores.count(name) == 1} - set(self.parameters)
        self._bounds: dict[str, tuple[float, float]] = {}  # of names that are assigned once

    def error(self, text: str, node: ast.AST) -> PolicyError:
        return PolicyError(text, Place(self.file, getattr(node, "lineno", self.source.lineno)))

    def warn(self, text: str, node: ast.AST) -> None:
        self.program.warnings[Place(self.file, getattr(node, "lineno", self.source.lineno)), text] = None

    def floating(self, node: ast.AST) -> PolicyError:
        return self.error(f"{self.source.name} uses a float; {SCALED}", node)

    def unsupported(self, node: ast.expr | ast.stmt) -> PolicyError:
        """An error that quotes the user's unsupported code."""
        for what, kinds in NOT_IN_A_POLICY.items():
            if isinstance(node, kinds):
                return self.error(f"{self.source.name} uses {what}, which policies do not support", node)
        text = ast.unparse(node).partition("\n")[0]
        return self.error(f"{self.source.name} uses `{text}`, which policies do not support", node)

    # ---- expressions ----------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, known: set[str]) -> Value:
        value = self._expression(node, known)
        return value._replace(node=ast.copy_location(value.node, node))

    def _expression(self, node: ast.expr, known: set[str]) -> Value:
        match node:
            case ast.Name(id=name) if name in self.local:
                return self.local_name(name, node, known)
            case ast.Constant() | ast.Name():
                return self.constant(self.value_of(node, known), node)
            case ast.Attribute(value=ast.Name(id=name), attr=field) if self.kinds.get(name) == "request":
                return self.field(node, name, field)
            case ast.Attribute():
                return self.constant(self.value_of(node, known), node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Value(ast.UnaryOp(ast.Not(), self.condition(operand, known)), "truth")
            case ast.UnaryOp(op=op, operand=operand):
                return self.signed(node, op, self.expression(operand, known))
            case ast.BinOp(left=left, op=op, right=right):
                return self.combined(node, op, self.expression(left, known), self.expression(right, known))
            case ast.BoolOp(op=op, values=parts):
                values = self.of_one_kind([self.expression(part, known) for part in parts], node)
                return Value(ast.BoolOp(op, [value.node for value in values]), values[0].kind)
            case ast.Compare():
                return self.comparison(node, known)
            case ast.IfExp(test=test, body=body, orelse=other):
                condition = self.condition(test, known)
                first, second = self.of_one_kind([self.expression(body, known), self.expression(other, known)], node)
                bounds = min(first.low, second.low), max(first.high, second.high)
                return Value(ast.IfExp(condition, first.node, second.node), first.kind, *bounds)
            case ast.Subscript(value=table, slice=index):
                return self.subscript(node, table, self.expression(index, known), known)
            case ast.Call():
                return self.call(node, known)
        raise self.unsupported(node)

    def local_name(self, name: str, node: ast.AST, known: set[str]) -> Value:
        if name not in known:
            raise self.error(f"{name} may be read before it is assigned", node)
        return Value(ast.Name(name, ast.Load()), self.kinds[name], *self._bounds.get(name, ()))

    def value_of(self, node: ast.expr, known: set[str]) -> Any:
        """The value of a constant, a global name or a module's attribute. Raises PolicyError for other nodes."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name not in self.local:
                for names in (self.cells, self.function.__globals__, vars(builtins)):
                    if name in names:
                        if isinstance(names[name], MUTABLE):
                            self.warn(f"{self.source.name} reads {name}, which can change; {KEPT}", node)
                        return names[name]
                raise self.error(f"{name} is not defined", node)
            case ast.Attribute(value=module, attr=name):
                inner = self.value_of(module, known)
                if isinstance(inner, ModuleType) and hasattr(inner, name):
                    return getattr(inner, name)
        raise self.unsupported(node)

    def constant(self, value: Any, node: ast.AST) -> Value:
        match value:
            case bool() | np.bool_():
                return Value(ast.Constant(bool(value)), "truth", 0, 1)
            case int() | np.integer():
                if not G.LOWEST <= value <= G.HIGHEST:
                    raise self.error(f"{value} does not fit into 64 bits", node)
                return Value(ast.Constant(int(value)), "integer", int(value), int(value))
            case float() | np.floating():
                raise self.floating(node)
        text = ast.unparse(node)
        what = "a string" if isinstance(value, str) else "None" if value is None else f"`{text}`, a {type(value).__name__}"
        raise self.error(f"{self.source.name} uses {what}; policies support only numbers", node)

    def field(self, node: ast.AST, request: str, field: str) -> Value:
        fields = self.program.fields
        if field not in fields:
            near = get_close_matches(field, fields, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise self.error(f"a request has no field {field}; {hint}fields: {', '.join(fields)}", node)
        return Value(ast.Attribute(ast.Name(request, ast.Load()), field, ast.Load()), "integer", LEAST.get(field, 0))

    def signed(self, node: ast.AST, op: ast.unaryop, value: Value) -> Value:
        operand = self.integer(value, node)
        if isinstance(op, ast.USub):
            folded = isinstance(operand, ast.Constant)
            negated = ast.Constant(-operand.value) if folded else self.guarded(G.negate, [operand], node)  # type: ignore[attr-defined]
            return Value(negated, "integer", -value.high, -value.low)
        return Value(ast.UnaryOp(op, operand), "integer")

    def combined(self, node: ast.expr | ast.stmt, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(op, ast.Div):
            raise self.floating(node)
        a, b = self.integer(left, node), self.integer(right, node)
        if isinstance(op, BIT_OPERATORS):
            return Value(ast.BinOp(a, op, b), "integer")
        if type(op) not in INTEGER_OPERATORS:
            raise self.unsupported(node)
        if isinstance(op, DIVISIONS) and right.low <= 0 <= right.high:
            divisor = ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value)  # type: ignore[union-attr]
            self.warn(f"{self.source.name} divides by {divisor}, which may be 0; {LAST}", node)
        return Value(self.guarded(INTEGER_OPERATORS[type(op)], [a, b], node), "integer", *_bounds(op, left, right))

    def comparison(self, node: ast.Compare, known: set[str]) -> Value:
        """Rewrite a chain as pairs; its middle operands are then evaluated twice."""
        operands = [node.left, *node.comparators]
        for repeated in operands[1:-1]:
            if any(isinstance(part, ast.Call) for part in ast.walk(repeated)):
                raise self.error("a chained comparison can't contain a call in the middle: write `a < f(b) and f(b) < c`", node)
        parts = []
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple) and len(node.ops) == 1 and right.elts:
                return self.membership(node, op, right.elts, known)
            if not isinstance(op, COMPARISONS):
                raise self.unsupported(node)
            parts.append(self.compared(node, op, self.expression(left, known), self.expression(right, known)))
        return Value(parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts), "truth")

    def membership(self, node: ast.Compare, op: ast.cmpop, elements: list[ast.expr], known: set[str]) -> Value:
        if any(isinstance(part, ast.Call) for part in ast.walk(node.left)):
            raise self.error("a call can't be on the left of `in`: assign its result to a variable first", node)
        each = [self.compared(node, ast.Eq(), self.expression(node.left, known), self.expression(e, known)) for e in elements]
        found = each[0] if len(each) == 1 else ast.BoolOp(ast.Or(), each)
        return Value(found if isinstance(op, ast.In) else ast.UnaryOp(ast.Not(), found), "truth")

    def compared(self, node: ast.AST, op: ast.cmpop, left: Value, right: Value) -> ast.expr:
        return ast.Compare(self.integer(left, node), [op], [self.integer(right, node)])

    def subscript(self, node: ast.AST, table: ast.expr, index: Value, known: set[str]) -> Value:
        try:
            name, length = self.program.array(self.value_of(table, known))
        except (ValueError, TypeError) as error:
            text = f"{ast.unparse(table)} must be a one-dimensional tuple or array of integers, defined in the module"
            raise self.error(text, node) from error
        where = self.guarded(G.element, [self.integer(index, node), ast.Constant(length)], node)
        read = ast.Subscript(ast.Name(name, ast.Load()), where, ast.Load())
        return Value(ast.Call(self.own(int), [read], []), "integer")

    def call(self, node: ast.Call, known: set[str]) -> Value:
        function = self.value_of(node.func, known)
        own = function.py_func if isinstance(function, Dispatcher) else function
        if isinstance(own, FunctionType) and (own.__module__ or "").partition(".")[0] not in LIBRARIES:
            return self.own_call(node, own, known)
        if function is len and len(node.args) == 1 and not node.keywords:
            try:
                return Value(ast.Constant(self.program.array(self.value_of(node.args[0], known))[1]), "integer")
            except (ValueError, TypeError) as error:
                raise self.unsupported(node) from error
        values = [] if node.keywords else [self.expression(argument, known) for argument in node.args]
        for choices, guard in CHOICES:
            if any(function is each for each in choices) and len(values) >= 2:
                values = self.of_one_kind(values, node)
                chosen = values[0].node
                for value in values[1:]:
                    chosen = ast.Call(self.own(guard), [chosen, value.node], [])
                take = max if guard is G.larger else min
                bounds = take(value.low for value in values), take(value.high for value in values)
                return Value(chosen, values[0].kind, *bounds)
        if len(values) == 1:
            converted = self.conversion(function, values[0], node)
            if converted is not None:
                return converted
        raise self.error(f"{self.source.name} calls `{ast.unparse(node)}`; a policy can call {CALLABLE}", node)

    def conversion(self, function: Any, value: Value, node: ast.AST) -> Value | None:
        """A call of a known function with one argument, or None."""
        if any(function is each for each in FLOATING):
            raise self.floating(node)
        if function is bool:
            return Value(ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), value.node)), "truth")
        if any(function is each for each in TO_INTEGER):
            return Value(self.integer(value, node), "integer", value.low, value.high)
        if function is abs:
            return Value(self.guarded(G.magnitude, [self.integer(value, node)], node), "integer", 0)
        return None

    def own_call(self, node: ast.Call, function: FunctionType, known: set[str]) -> Value:
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(each, ast.Starred) for each in node.args):
            raise self.unsupported(node)
        given = [self.expression(argument, known) for argument in node.args]
        named = {str(keyword.arg): self.expression(keyword.value, known) for keyword in node.keywords}
        try:
            bound = inspect.signature(function).bind(*given, **named)
        except TypeError as error:
            raise self.error(f"{ast.unparse(node)}: {error}", node) from error
        bound.apply_defaults()
        values = [value if isinstance(value, Value) else self.constant(value, node) for value in bound.args]
        kinds: tuple[Kind, ...] = tuple(value.kind for value in values)
        name, kind = self.program.function(function, kinds, Place(self.file, node.lineno))
        return Value(ast.Call(ast.Name(name, ast.Load()), [*(value.node for value in values), *GUARDS], []), kind)

    # ---- kinds ----------------------------------------------------------------------------------------------------------

    def condition(self, node: ast.expr, known: set[str]) -> ast.expr:
        value = self.expression(node, known)
        if value.kind == "request":
            raise self.error("the request can't be a condition; use its fields", node)
        return value.node

    def of_one_kind(self, values: list[Value], node: ast.AST) -> list[Value]:
        """Convert alternative values to one kind: integers, or truth values."""
        if {value.kind for value in values} == {"truth"}:
            return values
        return [value._replace(node=self.integer(value, node), kind="integer") for value in values]

    def converted(self, value: Value, kind: Kind, what: str, node: ast.AST) -> ast.expr:
        """A value converted to a kind: unchanged if it has the kind, or a truth value as an integer."""
        if value.kind == kind:
            return value.node
        if (value.kind, kind) == ("truth", "integer"):
            return self.integer(value, node)
        raise self.error(f"{what} {A_KIND[kind]} elsewhere but {A_KIND[value.kind]} here", node)

    def integer(self, value: Value, node: ast.AST) -> ast.expr:
        match value.kind:
            case "integer":
                return value.node
            case "truth":
                return ast.IfExp(value.node, ast.Constant(1), ast.Constant(0))
        raise self.error(f"an integer is needed here, not {A_KIND[value.kind]}", node)

    # ---- names of the written code ------------------------------------------------------------------------------------------

    def own(self, function: Callable[..., Any]) -> ast.Name:
        name = f"{OWN}{function.__name__}"
        self.program.names[name] = function
        return ast.Name(name, ast.Load())

    def guarded(self, function: Callable[..., Any], arguments: list[ast.expr], node: ast.AST) -> ast.expr:
        """A call of a function of guarded_arithmetic."""
        place, places = Place(self.file, getattr(node, "lineno", 0)), self.program.places
        if place not in places:
            places.append(place)
        return ast.Call(self.own(function), [*arguments, *GUARDS, ast.Constant(places.index(place))], [])


def _bounds(op: ast.operator, left: Value, right: Value) -> tuple[float, float]:
    """The bounds of `left op right`, if the operands' bounds determine them."""
    if isinstance(op, ast.Add):
        return left.low + right.low, left.high + right.high
    if min(left.low, right.low) < 0:
        return -math.inf, math.inf
    match op:
        case ast.Mult():
            return left.low * right.low, math.inf
        case ast.LShift():
            return left.low, math.inf
        case ast.FloorDiv() | ast.RShift() | ast.Mod():
            return 0, math.inf
    return -math.inf, math.inf
