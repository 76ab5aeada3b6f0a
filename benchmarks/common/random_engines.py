"""Engines with random weights that one benchmark starts one after another, each on the whole GPU."""

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.common.harness import Run, UsageError
from benchmarks.common.model_shapes import SHAPES
from benchmarks.common.nvml import EnergyMeter
from blinkpy.config import ConfigError

Key = TypeVar("Key")
Figures = TypeVar("Figures")


def model_options(folder: str, run: Run) -> dict[str, Any]:
    """The options of the model: the shape `run.options.shape` on a GPU, written into a folder; with --smoke, the demonstration
    model on a CPU.
    """
    if run.options.smoke:
        return {"model": "demo", "device": "cpu"}
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[run.options.shape]))
    (Path(folder) / "tokenizer.json").write_text("{}")
    return {"model": folder, "device": "cuda", "load_format": "dummy"}


def one_by_one(keys: Iterable[Key], measure: Callable[[Key], Figures]) -> list[tuple[Key, Figures]]:
    """(key, figures) of each engine, whose memory is freed before the next. Raises UsageError if an engine is not possible."""
    found = []
    for key in keys:
        try:
            found.append((key, measure(key)))
        except ConfigError as error:
            raise UsageError(str(error)) from error
        gc.collect()  # the next engine needs this engine's memory
        torch.cuda.empty_cache()
    return found


def measured_on(run: Run) -> dict[str, str]:
    """The GPU and the shape of the engines, for a result file."""
    with EnergyMeter() as meter:
        gpu = "" if run.options.smoke else str(meter.facts.get("gpu", "unknown"))
    return {"gpu": gpu, "shape": "demo" if run.options.smoke else run.options.shape}
