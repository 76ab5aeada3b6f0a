"""The forms of a model that ran on a GPU: two layers with its widths, compared with transformers. Needs no torch.

tools/write_tried_widths.py generates `tried_widths.json` from benchmarks/results/published_widths.json (`make docs`).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription

FILE = Path(__file__).with_name("tried_widths.json")


class Tried(NamedTuple):
    """One run on a GPU."""

    form: str  # "bfloat16", "fp8" (a scale for each row), "fp8_blocks", "mxfp4", "w4a16" or "nvfp4"
    kv_cache: str  # value of --kv-cache-dtype
    gpu: str
    agrees: bool  # log probabilities are within the test's limit
    largest_error: float | None  # of a log probability
    date: str
    commit: str

    @property
    def text(self) -> str:
        """The result as text."""
        cache = "" if self.kv_cache == "auto" else f" with a cache of {self.kv_cache}"
        error = "" if self.largest_error is None else f", largest error {self.largest_error:.2g}"
        return f"{self.form}{cache} {'agrees' if self.agrees else 'differs'}{error} ({self.gpu}, {self.date[:10]})"


def widths_of(model: DecoderDescription) -> str:
    """The sizes on which the choice of kernels for a model's layers depends. Models with equal sizes share
    results.
    """
    mlps = []
    for mlp in dict.fromkeys(layer.mlp for layer in model.layers):
        if isinstance(mlp, Experts):
            mlps.append(f"experts {mlp.number} top {mlp.top_k} of {mlp.size} shared {mlp.shared}")
        else:
            mlps.append(f"mlp {mlp.size}")
    sizes = dict.fromkeys((layer.attention.kv_heads, layer.attention.head_dim) for layer in model.layers)
    attention = " ".join(f"heads {model.heads} over {kv_heads} of {head_dim}" for kv_heads, head_dim in sizes)
    return f"{model.name} hidden {model.hidden_size} {attention} {' '.join(sorted(mlps))}"


def tried(model: DecoderDescription, path: Path = FILE) -> list[Tried]:
    """The runs of models with these widths, in the order of the file. Raises ConfigError for a damaged file."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return [Tried(**run) for run in document["runs"].get(widths_of(model), [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a list of runs on GPUs: {error}; install blinkpy again") from error
