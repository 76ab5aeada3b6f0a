"""Ranks a request by interpreting the policy's source line by line, with Python's numbers. It is slow, and compiles nothing.

policy_language must have accepted the policy. This module shares no code with policy_language.
"""

import ast
import builtins
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher

from blinkpy.device.lanes import definition_of
from blinkpy.scheduler import guarded_arithmetic as P
from blinkpy.scheduler.policies import Policy, RequestFields

INT64 = range(-(1 << 63), 1 << 63)
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: lambda a, b: int(a) & int(b),
    ast.BitOr: lambda a, b: int(a) | int(b),
    ast.BitXor: lambda a, b: int(a) ^ int(b),
    ast.LShift: lambda a, b: int(a) << b if b < 64 or a == 0 else 1 << 64,
    ast.RShift: lambda a, b: a >> b,
    ast.Pow: lambda a, b: a**b if b < 64 or abs(a) < 2 else 1 << 64,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
NEGATIVE_COUNT = (ast.LShift, ast.RShift, ast.Pow)


class FaultError(Exception):
    """A call without a result. kind, place: kind and source position of the fault."""

    def __init__(self, kind: int, place: P.Place):
        super().__init__(P.FAULT_TEXTS[kind])
        self.kind, self.place = kind, place


class _Return(Exception):
    """args: the result."""


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


def rank_by_rules(policy: Policy, request: RequestFields, rounds: int = 0) -> tuple[int, FaultError | None]:
    """Evaluate a policy. Returns the request's rank and, if the policy has no result, the fault; the rank is
    then the worst.

    rounds: loop rounds already used.
    """
    code = policy.__code__
    try:
        assert isinstance(policy, FunctionType)
        rank = int(_Call(policy, (request,), [rounds]).run())
        if rank > P.WORST_RANK:
            raise FaultError(P.BAD_RANK, P.Place(code.co_filename, code.co_firstlineno))
    except FaultError as fault:
        return P.WORST_RANK, fault
    return rank, None


class _Call:
    """One call of a function. rounds: [number of loop rounds so far], shared by nested calls."""

    def __init__(self, function: FunctionType, values: tuple[Any, ...], rounds: list[int]):
        self.function = function
        self.rounds = rounds
        self.source = definition_of(function)
        names = [argument.arg for argument in (*self.source.args.posonlyargs, *self.source.args.args)]
        values += (function.__defaults__ or ())[len(values) - len(names) :] if len(values) < len(names) else ()
        self.local = dict(zip(names, values, strict=True))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.outer = vars(builtins) | function.__globals__ | {name: cell.cell_contents for name, cell in cells}

    def run(self) -> Any:
        try:
            self.block(self.source.body)
        except _Return as result:
            return result.args[0]
        raise ValueError(f"{self.function.__name__} has no result")

    def fault(self, kind: int, node: Any) -> FaultError:
        return FaultError(kind, P.Place(self.function.__code__.co_filename, node.lineno))

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Return():
                raise _Return(self.value(node.value))
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                self.local |= dict(zip([name.id for name in names], [self.value(value) for value in values], strict=True))  # type: ignore[attr-defined]
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value):
                self.local[name] = self.value(value)
            case ast.AugAssign(target=ast.Name(id=name)):
                self.local[name] = self.binary(node, node.op, self.local[name], self.value(node.value))
            case ast.If():
                self.block(node.body if self.value(node.test) else node.orelse)
            case ast.While():
                self.loop(node, iter(lambda: bool(self.value(node.test)), False), "")
            case ast.For(iter=ast.Call(args=bounds), target=ast.Name(id=name)):
                self.loop(node, iter(self.range(node, [int(self.value(bound)) for bound in bounds])), name)
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue

    def range(self, node: ast.For, bounds: list[int]) -> range:
        values = slice(*bounds) if len(bounds) > 1 else slice(0, bounds[0])
        step = 1 if values.step is None else values.step
        if step == 0 or (values.stop - values.start) * (1 if step > 0 else -1) not in range(-(1 << 64), 1 << 63):
            raise self.fault(P.BAD_STEP, node)
        return range(values.start, values.stop, step)

    def loop(self, node: ast.While | ast.For, rounds: Any, name: str) -> None:
        for at in rounds:
            if self.rounds[0] == P.MOST_ROUNDS:
                raise self.fault(P.ENDLESS, node)
            self.rounds[0] += 1
            if name:
                self.local[name] = at
            try:
                self.block(node.body)
            except _Continue:
                continue
            except _Break:
                break

    def value(self, node: Any) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.local[name] if name in self.local else self.outer[name]
            case ast.Attribute(value=of, attr=name):
                return getattr(self.value(of), name)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.fitting(node, -self.value(operand))
            case ast.UnaryOp(op=op, operand=operand):
                return ~int(self.value(operand)) if isinstance(op, ast.Invert) else +self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(node, op, self.value(left), self.value(right))
            case ast.BoolOp(op=op, values=values):
                return self.choice(isinstance(op, ast.Or), values)
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body) if self.value(test) else self.value(other)
            case ast.Subscript(value=table, slice=index):
                return self.element(node, np.asarray(self.value(table)).tolist(), self.value(index))
            case ast.Call():
                return self.call(node)
        raise ValueError(f"the language has no {type(node).__name__}")

    def fitting(self, node: Any, result: Any) -> Any:
        if result not in INT64:
            raise self.fault(P.OVERFLOW, node)
        return result

    def binary(self, node: Any, op: ast.operator, a: Any, b: Any) -> Any:
        if isinstance(op, NEGATIVE_COUNT) and b < 0:
            raise self.fault(P.BAD_SHIFT, node)
        if isinstance(op, ast.FloorDiv | ast.Mod) and b == 0:
            raise self.fault(P.ZERO_DIVISION, node)
        return self.fitting(node, BINARY[type(op)](a, b))

    def choice(self, until: bool, values: list[ast.expr]) -> Any:
        result = None
        for value in values:
            result = self.value(value)
            if bool(result) == until:
                break
        return result

    def compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                found = any(left == self.value(each) for each in right.elts)  # type: ignore[attr-defined]
                return found == isinstance(op, ast.In)
            other = self.value(right)
            if not COMPARE[type(op)](left, other):
                return False
            left = other
        return True

    def element(self, node: Any, table: list[Any], index: int) -> Any:
        if not -len(table) <= index < len(table):
            raise self.fault(P.BAD_INDEX, node)
        return table[index]

    def call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        own = function.py_func if isinstance(function, Dispatcher) else function
        values = [self.value(argument) for argument in node.args]
        if isinstance(own, FunctionType):
            named = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
            names = own.__code__.co_varnames[len(values) : own.__code__.co_argcount]
            defaults: dict[str, Any] = dict(zip(reversed(names), reversed(own.__defaults__ or ()), strict=False))
            return _Call(own, (*values, *({**defaults, **named}[name] for name in names)), self.rounds).run()
        if function in (min, np.minimum, max, np.maximum):
            return (min if function in (min, np.minimum) else max)(values)
        if function in (int, np.int64, types.int64):
            return int(values[0])
        return self.fitting(node, function(values[0]))  # abs, bool, len
