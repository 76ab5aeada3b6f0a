"""The GPU's name and its own energy counter, through NVML (nvidia-ml-py). Where there is none, the reason is said instead."""

import os
import threading
import time
from typing import Any, Self

import numpy as np

from benchmarks.common.harness import revision, software

PERIOD_S = 0.05  # the counter itself moves every 20 to 100 ms
CLOCK_EVERY = 10  # readings of the counter: the clock is read less often
ENOUGH = 5  # readings for a line
SLACK_S = 0.5  # that readings may begin too late or end too early


class EnergyMeter:
    """Reads the energy counter of the first GPU of CUDA_VISIBLE_DEVICES, within a with block. missing: why it can't, or empty.
    period_s: between two readings of the counter; clock_every: of these to one of the clock."""

    def __init__(self, period_s: float = PERIOD_S, clock_every: int = CLOCK_EVERY):
        self.missing = ""
        self.facts: dict[str, Any] = {}
        self._marks: list[tuple[float, float]] = []  # (time.perf_counter(), joules)
        self._clocks: list[tuple[float, float]] = []  # (time.perf_counter(), MHz of the multiprocessors)
        self._period_s, self._clock_every = period_s, clock_every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handle = _visible(pynvml)
            self._joules()
            self._mhz()
            self.facts = {
                "gpu": pynvml.nvmlDeviceGetName(self._handle),
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total / 2**30, 1),
                "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(self._handle) / 1000,
            }
        except ImportError:
            self.missing = "nvidia-ml-py is not installed"
        except Exception as error:  # the library makes its classes at run time
            self.missing = f"no energy counter: {error}"

    def _joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def _mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._marks.append((time.perf_counter(), self._joules()))
            if len(self._marks) % self._clock_every == 0:
                self._clocks.append((time.perf_counter(), self._mhz()))

    def __enter__(self) -> Self:
        if not self.missing:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two times of time.perf_counter(), between two readings by interpolation; None if not read."""
        marks = list(self._marks)
        read = len(marks) > 1 and marks[0][0] < begin + SLACK_S and marks[-1][0] > end - SLACK_S
        return interpolated(marks, begin, end) if read else None

    def power_w(self, begin: float, end: float) -> float | None:
        """Power between two times of time.perf_counter() through which the load was the same: the slope of the line that fits the
        readings best. That the counter moves in steps disturbs it less than a difference. None without readings enough."""
        read = [mark for mark in list(self._marks) if begin <= mark[0] <= end]
        return slope(read) if len(read) >= ENOUGH else None

    def clock_mhz(self, begin: float, end: float) -> float | None:
        """Mean clock of the GPU's multiprocessors between two times of time.perf_counter(); None if it was not read meanwhile."""
        read = [mhz for when, mhz in list(self._clocks) if begin <= when <= end]
        return sum(read) / len(read) if read else None

    def watts(self, seconds: float) -> float | None:
        """Mean power over the next seconds; None without a counter."""
        if self.missing:
            return None
        began = time.perf_counter()
        time.sleep(seconds + 2 * self._period_s)
        joules = self.joules(began, began + seconds)
        return None if joules is None else round(joules / seconds, 1)


def slope(marks: list[tuple[float, float]]) -> float:
    """Of the straight line with the least squares through points (x, y)."""
    x, y = np.array(marks).T
    return float(np.polyfit(x - x[0], y - y[0], 1)[0])


def interpolated(marks: list[tuple[float, float]], begin: float, end: float) -> float:
    """Difference of a counter, read at some times as (time, value), between two others."""
    times, values = np.array(marks).T
    low, high = np.interp([begin, end], times, values)
    return float(high - low)


def _visible(nvml: Any) -> Any:
    """NVML's handle of the first of CUDA_VISIBLE_DEVICES: UUIDs, which may be cut short, or numbers, which mean the same as
    NVML's, in the order of the bus, with CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises LookupError when that names no such GPU."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first = listed.partition(",")[0].strip()
    if first.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    found = [handle for handle in handles if first and nvml.nvmlDeviceGetUUID(handle).startswith(first)]
    if len(found) != 1:
        raise LookupError(f"CUDA_VISIBLE_DEVICES={listed} names no GPU")
    return found[0]


def gpu_environment() -> dict[str, Any]:
    """The origin of a result from this GPU: card, driver, power limit, versions, commit, date."""
    facts = EnergyMeter().facts
    gpu = {name: facts.get(name, "unknown") for name in ("gpu", "driver", "power_limit_w")}
    return {**gpu, **software(), "commit": revision(), "date": time.strftime("%Y-%m-%d")}
