"""Decode attention alone, with the plan that `plan_decode` gives and with others around it: what the plan was chosen from.

    python -m benchmarks.tuning.attention_plans --fp8 --out attention_plans.json

For each number of rows and each context: microseconds of a layer, whose queries are rotated and whose new keys and values are
cached as in a step, and the time that the cache's bytes take at the memory's bandwidth. Layers run one behind another, each over
a cache of its own, which the L2 cache does not keep where they are large. Heads as Llama-3-8B has them.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.harness import revision, software
from benchmarks.tuning.kernel_tuner import layer_us
from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import AttentionCall, NewTokens, PagedKV
from blinkpy.kernels.attention.split_plan import DecodePlan, DecodeWorkspace, plan_decode
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS, COUNT_TOKENS

HEADS, KV_HEADS, HEAD_DIM, PAGE, MAX_CONTEXT = 32, 8, 128, 16, 8192
SIZES = ((1, 400), (1, 6000), (8, 4000), (16, 600), (64, 200), (64, 800), (256, 400))  # rows, tokens of each context
LAYERS = 8
BYTES_PER_US = 4.4e6  # that an H200's memory gives to a kernel that reads once


def neighbours(plan: DecodePlan) -> Iterator[DecodePlan]:
    """The plan, and such as differ from it in one or two parameters, each once."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"early_trigger": not plan.early_trigger},
        *({"warps": warps} for warps in (1, 2, 4)),
        *({"block_n": block_n, "warps": warps} for block_n in (32, 64, 128) for warps in (1, 2, 4)),
        *({"stages": stages} for stages in (1, 2, 3, 4)),
        {"min_tiles": 4, "splits": 8},
        {"min_tiles": 8, "splits": 8, "early_trigger": True},
    )
    yield from dict.fromkeys(replace(plan, **change) for change in changes)


def prepare(
    rows: int, context: int, plan: DecodePlan, device: str, *, fp8: bool, layers: int = LAYERS, seed: int = 0
) -> tuple[Callable[[], None], torch.Tensor]:
    """A function that launches this many layers of decode attention, each over its own cache, on bfloat16; and where the last one
    leaves its result."""
    generator = torch.Generator(device).manual_seed(seed)
    make: dict[str, Any] = {"dtype": torch.int32, "device": device}
    pages = -(-context // PAGE)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    for count in (COUNT_ROWS, COUNT_TOKENS, COUNT_DECODE_ROWS):
        counts[count.value] = rows
    slots, table = torch.arange(rows, **make), torch.arange(rows * pages, **make).view(rows, pages)
    contexts = torch.full((rows,), context, **make)
    cache_slots = table[:, (context - 1) // PAGE] * PAGE + (context - 1) % PAGE
    starts, emits = torch.arange(rows + 1, **make), torch.ones(rows, **make)
    batch = BatchView(counts, slots, starts, contexts, emits, contexts - 1, cache_slots)
    dtype, width = torch.float8_e4m3fn if fp8 else torch.bfloat16, (HEADS + 2 * KV_HEADS) * HEAD_DIM
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    qkv = [torch.empty(rows, width, **half).normal_(generator=generator) for _ in range(layers)]
    shape = (rows * pages, KV_HEADS, PAGE, HEAD_DIM)
    caches = [[torch.empty(shape, **half).normal_(generator=generator).to(dtype) for _ in range(2)] for _ in range(layers)]
    scales = torch.ones(2, KV_HEADS, device=device) if fp8 else None
    cos, sin = torch.ones(context, HEAD_DIM // 2, device=device), torch.zeros(context, HEAD_DIM // 2, device=device)
    workspace = DecodeWorkspace.allocate([(rows, plan)], HEADS, KV_HEADS, HEAD_DIM, device)
    out = torch.zeros(rows, HEADS * HEAD_DIM, **half)

    def launch() -> None:
        for new, (keys, values) in zip(qkv, caches, strict=True):
            queries, paged = new.view(rows, -1, HEAD_DIM)[:, :HEADS], PagedKV(keys, values, table, scales)
            call = AttentionCall(
                queries, paged, batch, out, rows, HEAD_DIM**-0.5, 0, workspace, NewTokens(new, cos, sin), pdl=device == "cuda"
            )
            attend(call, plan)

    return launch, out


def main() -> None:
    """Measure all sizes, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fp8", action="store_true", help="a cache of FP8 numbers")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    measured = []
    for rows, context in SIZES:
        planned = plan_decode(rows, KV_HEADS, MAX_CONTEXT, sm_count, fp8=options.fp8)
        floor = 2 * rows * context * KV_HEADS * HEAD_DIM * (1 if options.fp8 else 2) / BYTES_PER_US
        print(f"{rows} rows of {context} tokens: their bytes take {floor:.1f} us", flush=True)
        times: dict[DecodePlan, float] = {}
        for plan in neighbours(planned):
            times[plan] = layer_us(prepare(rows, context, plan, "cuda", fp8=options.fp8)[0], LAYERS, 6)
            print(f"{times[plan]:9.2f} us  {plan}{'  as planned' if plan == planned else ''}", flush=True)
        ranked = [[round(us, 2), asdict(plan)] for plan, us in sorted(times.items(), key=lambda item: item[1])]
        measured.append({"rows": rows, "context": context, "floor_us": floor, "planned_us": times[planned], "plans": ranked})
    about = {"gpu": torch.cuda.get_device_name(), "commit": revision(), "software": software()}
    options.out.write_text(json.dumps({**about, "fp8": options.fp8, "sizes": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
