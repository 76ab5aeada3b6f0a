"""Random policies from a grammar of the policies' language: they often overflow, divide by zero or never end."""

import random

from blinkpy.scheduler.policies import RequestFields

FIELDS = RequestFields._fields
HEADER = """
import numpy as np
TABLE = (3, -1, 0, 1 << 40, 7)
WEIGHTS = np.array([5, -2, 1 << 60])
SCALE = 1 << 33
"""
HIGHEST, LOWEST = "((1 << 62) - 1 + (1 << 62))", "(-(1 << 62) * 2)"
NUMBERS = (*("0", "1", "2", "-1", "-3", "7", "63", "1000") * 2, "SCALE", "(1 << 62)", HIGHEST, LOWEST)
INTEGER_OPERATORS = (*("+", "-", "//", "%") * 3, "*", "*", "**", "<<", ">>", "&", "|", "^")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class RandomPolicy:
    """The source of one policy, a function of a request, with its helpers."""

    def __init__(self, seed: int, name: str = "rank"):
        self.draw, self.name = random.Random(seed), name
        self.integers = list[str]()
        self._names = 0
        self._depth = 0

    def source(self) -> str:
        """The whole source."""
        self.integers = ["n", "x"]
        kind = self.draw.choice(("n // 3", "int(x)", "n"))
        statement = self.statements(1, "    ")
        helper = f"def {self.name}_helper(n, x=15):\n{statement}    return {kind} + {self.integer(2)}\n\n"
        self.integers = [f"request.{field}" for field in FIELDS]
        body = self.statements(self.draw.randint(1, 4), "    ")
        return f"{helper}def {self.name}(request):\n{body}    return {self.integer(3)}\n\n"

    def statements(self, count: int, indent: str) -> str:
        return "".join(self.statement(indent) for _ in range(count))

    def statement(self, indent: str) -> str:
        what = self.draw.randrange(8) if len(indent) < 12 else 0
        if what < 3:
            name, self._names = f"v{self._names}", self._names + 1
            text = f"{indent}{name} = {self.integer(3)}\n"
            self.integers.append(name)
            return text
        if what == 3 and (names := [name for name in self.integers if name.startswith("v")]):
            return f"{indent}{self.draw.choice(names)} {self.draw.choice(INTEGER_OPERATORS)}= {self.integer(2)}\n"
        if what < 6:
            other = f"{indent}else:\n{self.inner(indent)}" if self.draw.random() < 0.5 else ""
            return f"{indent}if {self.truth(2)}:\n{self.inner(indent)}{other}"
        if what == 6:
            name, self._names = f"v{self._names}", self._names + 1
            bounds = ", ".join(self.integer(1) for _ in range(self.draw.randint(1, 3)))
            return f"{indent}for {name} in range({bounds}):\n{self.inner(indent, name)}"
        return f"{indent}while {self.truth(2)}:\n{self.inner(indent)}"

    def inner(self, indent: str, name: str = "") -> str:
        """An indented block; the variables that it assigns have no value after it."""
        before = self.integers[:]
        self.integers += [name] if name else []
        text = self.statements(self.draw.randint(1, 2), indent + "    ")
        if self.draw.random() < 0.2:
            text += f"{indent}    return {self.integer(1)}\n"
        self.integers = before
        return text

    def integer(self, depth: int) -> str:
        draw = self.draw
        if depth == 0 or draw.random() < 0.2:
            return draw.choice(self.integers) if draw.random() < 0.7 else draw.choice(NUMBERS)
        return draw.choice((self._binary, self._binary, self._binary, self._call, self._choice, self._special))(depth - 1)

    def _binary(self, depth: int) -> str:
        return f"({self.integer(depth)} {self.draw.choice(INTEGER_OPERATORS)} {self.integer(depth)})"

    def _call(self, depth: int) -> str:
        form = self.draw.choice(("min({}, {})", "max({}, {}, {})", "abs({})", "-{}", "~{}", "np.maximum({}, {})"))
        return form.format(*(self.integer(depth) for _ in range(3)))

    def _choice(self, depth: int) -> str:
        form = self.draw.choice(("({} if {} else {})", "({0} + ({1}))", "({0} or {2})", "({0} and {2})"))
        return form.format(self.integer(depth), self.truth(depth), self.integer(depth))

    def _special(self, depth: int) -> str:
        forms = ["TABLE[{n} % 6]", "TABLE[{n}]", "WEIGHTS[{n} % 3]", "int({x})", "len(TABLE)", "np.int64({n})"]
        if "request.pair" in self.integers:
            forms += [self.name + "_helper({n})", self.name + "_helper({n}, x={x})", self.name + "_helper(1, {x})"]
        return self.draw.choice(forms).format(n=self.integer(depth), x=self.integer(depth))

    def truth(self, depth: int) -> str:
        draw = self.draw
        compared = draw.choice(COMPARISONS)
        simple = f"{self.integer(min(depth, 1))} {compared} {self.integer(min(depth, 1))}"
        if depth == 0 or draw.random() < 0.5:
            return simple
        return draw.choice(
            (
                f"({simple} and {self.truth(depth - 1)})",
                f"({simple} or {self.truth(depth - 1)})",
                f"(not {simple})",
                f"{draw.choice(self.integers)} in (1, {self.integer(0)}, -5)",
                f"0 <= {draw.choice(self.integers)} < {self.integer(0)}",
            )
        )


def random_request(draw: random.Random) -> RequestFields:
    """A request whose fields are random 64-bit values, bounds and small values."""

    def field() -> int:
        if draw.random() < 0.8:
            return draw.choice((draw.randint(-3, 9), draw.randint(0, 5000)))
        return draw.choice((draw.getrandbits(64) - (1 << 63), -(1 << 63), (1 << 63) - 1, 1 << 62))

    return RequestFields(*(field() for _ in FIELDS))
