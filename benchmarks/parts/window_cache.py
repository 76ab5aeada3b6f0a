"""What --window-cache ring saves: the cache of one sequence of 32,768 tokens, and how many such sequences an 80 GB GPU holds.

Nothing is measured. The cache is made as an engine makes it, but on torch's meta device, which has shapes and no memory, with
one slot, and its bytes are counted: pages for the whole sequence, and the ring of the slot with the spill pages of the largest
default step. How many sequences fit is the arithmetic of an engine's start with as many slots: the largest number whose pages
all fit beside weights, activations, scheduler state and rings. bfloat16, gpt-oss with 4-bit experts.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.harness import Run, run_benchmark
from benchmarks.common.model_shapes import SHAPES
from blinkpy.config import Config, step_sizes
from blinkpy.engine.sizing import pages_for
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.ring_sizes import ring_sizes
from blinkpy.serving.model_facts import GPUS, fit

TOKENS, GPU, MOST = 32768, "H100, 80 GB", 1024
SAVED = 0.6  # of one sequence's cache with Gemma 3, at least


@dataclass(frozen=True)
class Size:
    """What differs in a model's config.json from that of another shape."""

    like: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    window: int = 1024

    @property
    def config(self) -> dict[str, Any]:
        return SHAPES[self.like] | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "sliding_window": self.window,
            "max_position_embeddings": 131072,
        }


GEMMA, OSS = "gemma-3-1b", "gpt-oss-20b"
MODELS = {
    "Gemma 3 1B": SHAPES[GEMMA],
    "Gemma 3 4B": Size(GEMMA, 2560, 34, 8, 4, 256, 10240).config,
    "Gemma 3 12B": Size(GEMMA, 3840, 48, 16, 8, 256, 15360).config,
    "Gemma 3 27B": Size(GEMMA, 5376, 62, 32, 16, 128, 21504).config,
    "gpt-oss-20b": SHAPES[OSS],
    "gpt-oss-120b": SHAPES[OSS] | {"num_hidden_layers": 36, "num_local_experts": 128},
}


def config_of(model: DecoderDescription, kind: str, slots: int) -> Config:
    """Of an engine on a GPU with the default steps."""
    config = Config().with_options({"window_cache": kind, "slots": slots, "max_model_len": TOKENS, "dtype": "bfloat16"})
    return config.with_options(step_sizes(config.scheduler, gpu=True, experts=any(model.expert_layers)))


def cache_bytes(model: DecoderDescription, kind: str) -> int:
    """Of one sequence of TOKENS tokens."""
    config = config_of(model, kind, 1)
    page_size, rings = config.cache.page_size, ring_sizes(config, model)
    cache = PagedCache(model, pages_for(TOKENS, page_size), page_size, torch.bfloat16, "meta", rings)
    storages = {side.untyped_storage()._cdata: side.untyped_storage().nbytes() for side in (*cache.keys, *cache.values)}
    return sum(storages.values())


def sequences(model: DecoderDescription, kind: str) -> int:
    """Of TOKENS tokens that fit on the GPU, up to MOST; 0: none."""

    def fits(number: int) -> bool:
        found = fit(model, config_of(model, kind, number), GPU, GPUS[GPU])
        return not found.problem and found.cached >= number * TOKENS

    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def benchmark(run: Run) -> None:
    models = []
    for name, values in MODELS.items():
        model = describe_config(values)
        windows = [layer.attention.window for layer in model.layers if layer.attention.window]
        row: dict[str, Any] = {"model": name, "layers": len(model.layers), "with_window": len(windows), "window": windows[0]}
        for kind in ("full", "ring"):
            row[kind] = {"bytes": cache_bytes(model, kind), "sequences": sequences(model, kind)}
        models.append({**row, "saved": round(1 - row["ring"]["bytes"] / row["full"]["bytes"], 4)})
    least = min(row["saved"] for row in models if row["model"].startswith("Gemma 3"))
    run.target(f"share of the cache of {TOKENS:,} tokens that rings save, least of Gemma 3", least, SAVED, "", at_most=False)
    run.write(__doc__, {"tokens": TOKENS, "fits": GPU, "models": models})


if __name__ == "__main__":
    run_benchmark("parts.window_cache", "What window rings save of the KV cache.", benchmark)
