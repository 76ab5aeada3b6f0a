"""The language of users' policies: a subset of Python that can't crash the engine.

`write_guarded` rewrites a policy's source, with the functions of guarded_arithmetic instead of operators
and with bounded loops. It refuses unsupported code, with the line. Each variable and function has one kind
of value:

    integer   64 bits; an overflow is a fault. There are no floats, whose rounding could make different ranks
    equal
    truth     of a comparison; 0 or 1 if an integer is needed
    request   the argument of rank; it may be an argument of a call, and its fields are integers

The same pass finds bounds of each value, as far as possible, and warns of divisors that may be 0. It also
warns of mutable values of the module, because compiled code keeps their values at the engine's start.
"""

import ast
import builtins
import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher

from blinkpy.device.lanes import definition_of
from blinkpy.device.portable import device
from blinkpy.scheduler import guarded_arithmetic as G
from blinkpy.scheduler.guarded_arithmetic import Place
from blinkpy.scheduler.policy_key import LIBRARIES

Kind = Literal["integer", "truth", "request"]
OWN = "_blinkpy_"  # prefix that a policy must not use in names
GUARDS = [ast.Name(f"{OWN}faults", ast.Load()), ast.Name(f"{OWN}at", ast.Load())]
ZERO: dict[Kind, Any] = {"integer": 0, "truth": False}
A_KIND = {"integer": "an integer", "truth": "a truth value", "request": "the request"}

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
"""The least value of a request's field; 0 for the others."""
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


class PolicyError(Exception):
    """A policy uses unsupported code. place: line of the code."""

    def __init__(self, text: str, place: Place):
        super().__init__(text)
        self.text, self.place = text, place


class GuardedPolicy(NamedTuple):
    """A policy that can't crash the engine.

    function: (request, faults, at) -> integer, see guarded_arithmetic; a device function.
    """

    function: Callable[..., int]
    places: tuple[Place, ...]  # of its faults
    warnings: tuple[tuple[Place, str], ...]  # possible mistakes


class Value(NamedTuple):
    """A rewritten expression and its kind."""

    node: ast.expr
    kind: Kind
    low: float = -math.inf  # bounds of an integer, as far as known
    high: float = math.inf


def write_guarded(policy: FunctionType, fields: tuple[str, ...]) -> GuardedPolicy:
    """Rewrite a policy to guarded code. fields: a request's fields. Raises PolicyError with the line for
    unsupported code.
    """
    program = Program(fields)
    code = policy.__code__
    program.places.append(Place(code.co_filename, code.co_firstlineno))
    name, kind = program.function(policy, ("request",), program.places[0])
    if kind != "integer":
        raise PolicyError(f"must return an integer, not {A_KIND[kind]}", program.places[0])
    for definition, file in program.definitions:
        module = ast.fix_missing_locations(ast.Module([definition], []))
        exec(compile(module, file, "exec"), program.names)
        program.names[definition.name] = device(program.names[definition.name])
    return GuardedPolicy(program.names[name], tuple(program.places), tuple(program.warnings))


class Program:
    """All functions of a policy.

    fields: a request's fields.
    names: globals of the rewritten code.
    definitions: the rewritten functions, with their files.
    """

    def __init__(self, fields: tuple[str, ...]):
        self.fields = fields
        self.places: list[Place] = []
        self.warnings: dict[tuple[Place, str], None] = {}  # in order, once each
        self.names: dict[str, Any] = {"__name__": f"{OWN}policy"}
        self.definitions: list[tuple[ast.FunctionDef, str]] = []
        self._written: dict[tuple[Any, ...], tuple[str, Kind] | None] = {}

    def function(self, function: FunctionType, kinds: tuple[Kind, ...], caller: Place) -> tuple[str, Kind]:
        """Rewrite a function for arguments of these kinds, once. Returns its name in the rewritten code, and
        the kind of its result.
        """
        key = function, kinds
        if key not in self._written:
            self._written[key] = None
            name = f"{OWN}{len(self._written)}_{function.__name__}"
            try:
                source = definition_of(function)
            except (OSError, ValueError) as error:
                raise PolicyError(
                    f"calls {function.__name__}, which is not a function defined with `def` in a source file", caller
                ) from error
            writer = FunctionWriter(self, function, source, kinds)
            self.definitions.append((writer.write(name), writer.file))
            self._written[key] = name, writer.result or "integer"
        written = self._written[key]
        if written is None:
            raise PolicyError(f"{function.__name__} calls itself; use a loop", caller)
        return written

    def array(self, value: Any) -> tuple[str, int]:
        """Add an array of integers to the rewritten code. Returns its name and length. Raises ValueError for
        other values.
        """
        array = np.asarray(value)
        if array.ndim != 1 or not len(array) or not np.can_cast(array.dtype, np.int64):
            raise ValueError
        name = f"{OWN}array_{len(self.names)}"
        self.names[name] = array.astype(np.int64)
        return name, len(array)


class FunctionWriter:
    """Rewrites one function. result: the kind of its result, None until it is known."""

    def __init__(self, program: Program, function: FunctionType, source: ast.FunctionDef, kinds: tuple[Kind, ...]):
        self.program = program
        self.function = function
        self.source = source
        self.file = function.__code__.co_filename
        self.result: Kind | None = None
        self.parameters = [argument.arg for argument in (*source.args.posonlyargs, *source.args.args)]
        self.kinds: dict[str, Kind] = dict(zip(self.parameters, kinds, strict=False))  # of all local names
        self._given = len(kinds)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell.cell_contents for name, cell in cells}
        self.local = set(function.__code__.co_varnames)
        self._breaks: list[list[set[str]]] = []  # for each open loop, the assigned names at its breaks
        self._temporaries = 0
        stores = [each.id for each in ast.walk(source) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        self._once = {name for name in stores if stores.count(name) == 1} - set(self.parameters)
        self._bounds: dict[str, tuple[float, float]] = {}  # of names that are assigned once

    def write(self, name: str) -> ast.FunctionDef:
        """The rewritten function, with two more arguments: the words of faults, and the request's index in
        them.
        """
        arguments = self.source.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            raise self.error(f"{self.source.name} has arguments other than plain positional ones", self.source)
        for used in self.local:
            if used.startswith(OWN):
                raise self.error(f"names that begin with {OWN} are reserved", self.source)
        left_out = self.parameters[self._given :]
        defaults = (self.function.__defaults__ or ())[-len(left_out) :] if left_out else ()
        constants = [self.constant(value, self.source) for value in defaults]
        preset = [self.assigned(each, value, self.source) for each, value in zip(left_out, constants, strict=True)]
        body, ends = self.block(self.source.body, set(self.parameters))
        if ends is not None or self.result is None:
            raise self.error(
                f"{self.source.name} must return an integer on every path, but may end without `return`", self.source
            )
        zeros = [self._assign(local, Value(ast.Constant(ZERO[kind]), kind)) for local, kind in self._own_names()]
        last = ast.Return(ast.Constant(ZERO[self.result]))  # for loops that were stopped
        every = [ast.arg(parameter) for parameter in (*self.parameters[: self._given], *(name.id for name in GUARDS))]
        written = ast.FunctionDef(
            name,
            ast.arguments(posonlyargs=[], args=every, kwonlyargs=[], kw_defaults=[], defaults=[]),
            [*zeros, *preset, *body, last],
            [],
        )
        return ast.copy_location(written, self.source)

    def _own_names(self) -> list[tuple[str, Kind]]:
        return [(name, kind) for name, kind in self.kinds.items() if name not in self.parameters[: self._given]]

    def error(self, text: str, node: ast.AST) -> PolicyError:
        return PolicyError(text, Place(self.file, getattr(node, "lineno", self.source.lineno)))

    def warn(self, text: str, node: ast.AST) -> None:
        self.program.warnings[Place(self.file, getattr(node, "lineno", self.source.lineno)), text] = None

    def floating(self, node: ast.AST) -> PolicyError:
        return self.error(f"{self.source.name} uses a float; {SCALED}", node)

    def unsupported(self, node: ast.expr | ast.stmt) -> PolicyError:
        """An error that names the unsupported code in the user's words."""
        for what, kinds in NOT_IN_A_POLICY.items():
            if isinstance(node, kinds):
                return self.error(f"{self.source.name} uses {what}, which policies do not support", node)
        text = ast.unparse(node).partition("\n")[0]
        return self.error(f"{self.source.name} uses `{text}`, which policies do not support", node)

    # ---- statements: each returns the rewritten ones, and the names assigned after them; None if unreachable -----

    def block(self, statements: list[ast.stmt], known: set[str]) -> tuple[list[ast.stmt], set[str] | None]:
        written: list[ast.stmt] = []
        left: set[str] | None = known
        for statement in statements:
            if left is None:
                break
            more, left = self.statement(statement, left)
            written += [ast.copy_location(each, statement) for each in more]
        return written or [ast.Pass()], left

    def statement(self, node: ast.stmt, known: set[str]) -> tuple[list[ast.stmt], set[str] | None]:
        match node:
            case ast.Return(value=ast.expr() as value):
                return [self.returned(node, self.expression(value, known))], None
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return [self.assigned(name, self.expression(value, known), node)], known | {name}
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
                return self.assigned_together(node, targets, [self.expression(value, known) for value in values], known)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                return [self.assigned(name, self.expression(value, known), node)], known | {name}
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                left, right = self.local_name(name, node, known), self.expression(value, known)
                return [self.assigned(name, self.combined(node, op, left, right), node)], known
            case ast.If(test=test, body=body, orelse=other):
                condition = self.condition(test, known)
                first, after_first = self.block(body, known)
                second, after_second = self.block(other, known)
                return [ast.If(condition, first, second)], _both(after_first, after_second)
            case ast.While(test=test, body=body, orelse=[]):
                return self.while_loop(node, test, body, known)
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=function, args=bounds, keywords=[]), body=body, orelse=[]):
                if self.value_of(function, known) is range and 1 <= len(bounds) <= 3:
                    return self.for_loop(node, name, bounds, body, known)
            case ast.Break():
                self._breaks[-1].append(known)
                return [node], None
            case ast.Continue():
                return [node], None
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return [ast.Pass()], known
            case ast.Return():
                raise self.error(f"{self.source.name} must return an integer, not None", node)
        if isinstance(node, ast.For):
            raise self.error("a `for` in a policy must loop over range(...) with one variable and without `else`", node)
        raise self.unsupported(node)

    def returned(self, node: ast.stmt, value: Value) -> ast.stmt:
        if value.kind == "request":
            raise self.error(f"{self.source.name} must return an integer, not the request", node)
        self.result = self.result or value.kind
        return ast.Return(self.converted(value, self.result, f"{self.source.name} returns", node))

    def assigned(self, name: str, value: Value, node: ast.AST) -> ast.stmt:
        if value.kind == "request":
            raise self.error("the request can't be assigned; use its fields", node)
        kind = self.kinds.setdefault(name, value.kind)
        if name in self._once:
            self._bounds[name] = value.low, value.high
        return self._assign(name, Value(self.converted(value, kind, f"{name} holds", node), kind))

    def _assign(self, name: str, value: Value) -> ast.stmt:
        return ast.Assign([ast.Name(name, ast.Store())], value.node)

    def assigned_together(
        self, node: ast.stmt, targets: list[ast.expr], values: list[Value], known: set[str]
    ) -> tuple[list[ast.stmt], set[str]]:
        """Rewrite `a, b = b, a`: evaluate all values first."""
        names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
        if "" in names:
            raise self.unsupported(node)
        temporaries = [self.temporary() for _ in values]
        stored = [self._assign(each, value) for each, value in zip(temporaries, values, strict=True)]
        loaded = [Value(ast.Name(each, ast.Load()), value.kind) for each, value in zip(temporaries, values, strict=True)]
        moved = [self.assigned(name, value, node) for name, value in zip(names, loaded, strict=True)]
        return [*stored, *moved], known | set(names)

    def temporary(self) -> str:
        self._temporaries += 1
        return f"{OWN}{self._temporaries}"

    def while_loop(
        self, node: ast.stmt, test: ast.expr, body: list[ast.stmt], known: set[str]
    ) -> tuple[list[ast.stmt], set[str] | None]:
        condition = self.condition(test, known)
        self._breaks.append([])
        inside, _ = self.block(body, known)
        ends: list[set[str]] = self._breaks.pop()
        if not (isinstance(test, ast.Constant) and test.value):
            ends.append(known)
        return [ast.While(condition, [self.bound(node), *inside], [])], set.intersection(*ends) if ends else None

    def for_loop(
        self, node: ast.stmt, name: str, bounds: list[ast.expr], body: list[ast.stmt], known: set[str]
    ) -> tuple[list[ast.stmt], set[str]]:
        """Rewrite as a loop over a count of rounds, because range itself may overflow."""
        values = [self.integer(self.expression(bound, known), bound) for bound in bounds]
        if len(values) == 1:
            values = [ast.Constant(0), *values]
        if len(values) == 2:
            values.append(ast.Constant(1))
        names = [self.temporary() for _ in range(3)]
        stored = [self._assign(each, Value(value, "integer")) for each, value in zip(names, values, strict=True)]
        first, last, step = (ast.Name(each, ast.Load()) for each in names)
        count = self.guarded(G.range_length, [first, last, step], node)
        round_ = self.temporary()
        at = ast.BinOp(first, ast.Add(), ast.BinOp(ast.Name(round_, ast.Load()), ast.Mult(), step))
        variable = self.assigned(name, Value(at, "integer"), node)
        self._breaks.append([])
        inside, _ = self.block(body, known | {name})
        self._breaks.pop()
        rounds = ast.Call(self.own(range), [count], [])
        loop = ast.For(ast.Name(round_, ast.Store()), rounds, [self.bound(node), variable, *inside], [])
        return [*stored, loop], known

    def bound(self, node: ast.AST) -> ast.stmt:
        return ast.If(self.guarded(G.out_of_rounds, [], node), [ast.Break()], [])

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
        """A chain is rewritten as pairs, so its middle operands are evaluated twice."""
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
        """Values of which one is chosen, converted to one kind: integers, or truth values."""
        if {value.kind for value in values} == {"truth"}:
            return values
        return [value._replace(node=self.integer(value, node), kind="integer") for value in values]

    def converted(self, value: Value, kind: Kind, what: str, node: ast.AST) -> ast.expr:
        """A value converted to a kind: its own kind, or integer if it is a truth value."""
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
    """The bounds of left op right, as far as the operands' bounds determine them."""
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


def _both(first: set[str] | None, second: set[str] | None) -> set[str] | None:
    """The variables that are assigned in both branches."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
