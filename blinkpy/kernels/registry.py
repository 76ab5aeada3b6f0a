"""Registries of variants: ways to compute one operation. A new one is a file that adds itself, and one import of that file."""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V", bound=Any)


class Registry(dict[str, V]):
    """Variants by name, in the order in which they were added. Each has a `name`, and declares the tests that prove it."""

    def add(self, variant: V) -> None:
        """Raises ValueError for a name that is taken."""
        if variant.name in self:
            raise ValueError(f"variant {variant.name!r} is added twice")
        self[variant.name] = variant
