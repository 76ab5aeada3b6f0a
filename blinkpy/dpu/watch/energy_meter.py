"""The GPU's energy and power, read by NVML on a thread of the first worker: no token waits for it. None without a GPU."""

import logging
import os
import threading
from importlib import import_module
from typing import Any

from blinkpy.dpu.metrics import Metrics

PERIOD_S = 1.0

logger = logging.getLogger("blinkpy.frontend")


def start_energy_meter(metrics: Metrics) -> "EnergyMeter | None":
    """Begin to read, if nvidia-ml-py is installed and finds a GPU that has a counter of energy."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        meter = EnergyMeter(nvml, chosen_gpu(nvml, os.environ.get("CUDA_VISIBLE_DEVICES", "")), metrics)
        meter.read()
    except Exception as error:  # NVML's own, and whatever else keeps a machine from telling
        logger.debug("no energy is read: %s", error)
        return None
    meter.start()
    return meter


def chosen_gpu(nvml: Any, visible: str) -> Any:
    """NVML's handle of the GPU that the engine takes: the first that CUDA_VISIBLE_DEVICES names, by number or UUID."""
    first = visible.partition(",")[0].strip()
    if first and not first.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first or 0))


class EnergyMeter(threading.Thread):
    """Reads once in PERIOD_S until stop()."""

    def __init__(self, nvml: Any, gpu: Any, metrics: Metrics):
        super().__init__(daemon=True, name="energy")
        self._nvml, self._gpu, self._metrics = nvml, gpu, metrics
        self._ended = threading.Event()

    def read(self) -> None:
        """Read once. Raises NVML's error."""
        self._metrics.gauge("gpu_energy_joules_total", self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3)
        self._metrics.gauge("gpu_power_watts", self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3)

    def run(self) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self.read()
        except Exception:  # the GPU is gone: the counter stays away rather than stand still
            logger.exception("the GPU's energy can't be read any more")
            self._metrics.gauge("gpu_energy_joules_total", 0)
            self._metrics.gauge("gpu_power_watts", 0)

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join(PERIOD_S)
