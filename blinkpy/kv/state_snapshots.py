"""NamedTuples of arrays, such as State, as trees: their arrays mapped, named, copied and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.array_trees import named_arrays
from blinkpy.kv.state import State


def snapshot(state: State) -> dict[str, NDArray[Any]]:
    """Copies of all arrays that must not depend on how schedule() was executed: everything but the scratch memory."""
    return {name: np.array(array) for name, array in named_arrays(state) if not name.startswith("scratch.")}


def differences(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> list[str]:
    """Where two snapshots differ, one line for each array: its name, the first index and both values."""
    lines = []
    for name in a:
        where = np.argwhere(a[name] != b[name])
        if len(where):
            index = tuple(int(i) for i in where[0])
            lines.append(f"{name}{list(index)}: {a[name][index]} != {b[name][index]} ({len(where)} differ)")
    return lines
