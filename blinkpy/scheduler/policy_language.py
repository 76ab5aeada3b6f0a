"""The language of users' policies: a subset of Python that can't crash the engine.

`write_guarded` rewrites a policy's source: functions of guarded_arithmetic replace operators, and loops are bounded. It refuses
unsupported code, and names the line. Each variable and function has one kind of value:

    integer   64 bits; an overflow is a fault. Floats are refused: their rounding could make different ranks equal
    truth     result of a comparison; 0 or 1 if an integer is needed
    request   the argument of rank; it may be an argument of a call, and its fields are integers

The same pass derives bounds of values, and warns of divisors that may be 0. It also warns of the module's mutable values, because
compiled code keeps the values at the engine's start.
"""

import ast
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

from blinkpy.device.portable import device
from blinkpy.scheduler import guarded_arithmetic as G
from blinkpy.scheduler.guarded_arithmetic import Place
from blinkpy.scheduler.policy_expressions import GUARDS, ExpressionWriter
from blinkpy.scheduler.policy_program import A_KIND, OWN, ZERO, Kind, PolicyError, Program, Value


class GuardedPolicy(NamedTuple):
    """A policy that can't crash the engine.

    function: (request, faults, at) -> integer, see guarded_arithmetic; a device function.
    """

    function: Callable[..., int]
    places: tuple[Place, ...]  # of its faults
    warnings: tuple[tuple[Place, str], ...]  # possible mistakes


def write_guarded(policy: FunctionType, fields: tuple[str, ...]) -> GuardedPolicy:
    """Rewrite a policy to guarded code. fields: a request's fields. Raises PolicyError with the line for
    unsupported code.
    """
    program = Program(fields, FunctionWriter)
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


class FunctionWriter(ExpressionWriter):
    """Rewrites one function. result: the kind of its result; None until known."""

    def __init__(self, program: Program, function: FunctionType, source: ast.FunctionDef, kinds: tuple[Kind, ...]):
        super().__init__(program, function, source, kinds)
        self.result: Kind | None = None
        self._breaks: list[list[set[str]]] = []  # for each open loop, the names assigned at its breaks
        self._temporaries = 0

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
        last = ast.Return(ast.Constant(ZERO[self.result]))  # reached if a loop was stopped
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
        """Rewrite as a loop over a count of rounds, because range could overflow."""
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


def _both(first: set[str] | None, second: set[str] | None) -> set[str] | None:
    """The variables that are assigned in both branches."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
