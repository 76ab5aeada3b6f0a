"""The functions of a policy during its rewriting, and the vocabulary for its values."""

import ast
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, NamedTuple

import numpy as np

from blinkpy.device.lanes import definition_of
from blinkpy.scheduler.guarded_arithmetic import Place

Kind = Literal["integer", "truth", "request"]
OWN = "_blinkpy_"  # prefix that a policy must not use in names
ZERO: dict[Kind, Any] = {"integer": 0, "truth": False}
A_KIND = {"integer": "an integer", "truth": "a truth value", "request": "the request"}


class PolicyError(Exception):
    """A policy uses unsupported code. place: line of the code."""

    def __init__(self, text: str, place: Place):
        super().__init__(text)
        self.text, self.place = text, place


class Value(NamedTuple):
    """A rewritten expression and its kind."""

    node: ast.expr
    kind: Kind
    low: float = -math.inf  # known bounds of an integer
    high: float = math.inf


class Program:
    """All functions of a policy.

    fields: a request's fields.
    names: globals of the rewritten code.
    definitions: the rewritten functions, with their files.
    writer: makes the writer of a function, see policy_language.FunctionWriter.
    """

    def __init__(self, fields: tuple[str, ...], writer: Callable[..., Any]):
        self.fields = fields
        self._writer = writer
        self.places: list[Place] = []
        self.warnings: dict[tuple[Place, str], None] = {}  # an ordered set
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
            writer = self._writer(self, function, source, kinds)
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
