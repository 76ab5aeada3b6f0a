"""The GPU's energy and power, read through NVML by a thread of the first worker. Disabled without a GPU."""

import logging
import os
import threading
from collections import deque
from importlib import import_module
from typing import Any

from blinkpy.dpu.metrics import METERS, Metrics

PERIOD_S = 1.0
READINGS = 60  # readings over which the energy per token is averaged

logger = logging.getLogger("blinkpy.frontend")


def start_energy_meter(metrics: Metrics) -> "EnergyMeter | None":
    """Start a meter if nvidia-ml-py is installed and finds a GPU with an energy counter."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        meter = EnergyMeter(nvml, chosen_gpu(nvml, os.environ.get("CUDA_VISIBLE_DEVICES", "")), metrics)
        meter.read()
    except Exception as error:  # NVML raises several kinds of exceptions, and these metrics are optional
        logger.info("energy metrics are disabled: %s", error)
        return None
    meter.start()
    return meter


def chosen_gpu(nvml: Any, visible: str) -> Any:
    """NVML's handle of the engine's GPU: the first in CUDA_VISIBLE_DEVICES, by number or UUID."""
    first = visible.partition(",")[0].strip()
    if first and not first.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first or 0))


class EnergyMeter(threading.Thread):
    """Reads the meters every PERIOD_S until stop()."""

    def __init__(self, nvml: Any, gpu: Any, metrics: Metrics):
        super().__init__(daemon=True, name="energy")
        self._nvml, self._gpu, self._metrics = nvml, gpu, metrics
        self._ended = threading.Event()
        self._readings = deque[tuple[float, float]](maxlen=READINGS + 1)  # joules, tokens of all workers

    def read(self) -> None:
        """Read once. Raises NVML's error."""
        energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3
        self._metrics.gauge("gpu_energy_joules_total", energy)
        self._metrics.gauge("gpu_power_watts", self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3)
        generated = self._metrics.gauge_of_all("generated_tokens")
        if self._readings and generated < self._readings[-1][1]:  # a worker restarted
            self._readings.clear()
        self._readings.append((energy, generated))
        joules, tokens = (last - first for first, last in zip(self._readings[0], self._readings[-1], strict=True))
        self._metrics.gauge("gpu_joules_per_token", joules / tokens if tokens > 0 else 0)

    def run(self) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self.read()
        except Exception:  # the GPU is gone: remove the metrics instead of repeating the last value
            logger.exception("energy metrics are disabled until a restart: can't read the GPU's energy meter")
            for name in METERS:
                self._metrics.gauge(name, 0)

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join(PERIOD_S)
