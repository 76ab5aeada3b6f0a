"""The tuner of the expert layers: finds the tiles of the grouped products on this GPU and writes the table that is shipped.

    python -m benchmarks.tuning.expert_tuner

All candidates are compiled first, in parallel processes that only fill Triton's cache. Then each product is timed alone, over
the weights of several layers and a random routing; the block size whose fastest tiles have the least sum wins.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.common import aot_cases, aot_compile
from benchmarks.tuning.kernel_tuner import about_tables, compiled, layer_us
from blinkpy.kernels.moe.expert_variants import ExpertConfig, ExpertShape, ExpertTable, ExpertTile
from blinkpy.kernels.moe.grouped_experts import grouped_linear
from blinkpy.kernels.moe.routing import Routing, Selection, route
from blinkpy.kv.state import ROWS, TOKENS

SHARED_MEMORY = 227 * 1024
SHAPES = {"Qwen3-30B-A3B": ExpertShape(experts=128, top_k=8, hidden=2048, width=768)}
LAYERS = 3  # layers whose weights are used in turn: together far larger than the cache


class Candidate(NamedTuple):
    """One way to compute one product. up: gate and up with SwiGLU, otherwise down."""

    shape: ExpertShape
    up: bool
    block_m: int
    tile: ExpertTile


def candidates(shape: ExpertShape, tokens: int) -> Iterator[Candidate]:
    """A few dozen candidates near known good configurations for this number of tokens."""
    each = tokens * shape.top_k / shape.experts
    blocks = (16,) if each <= 4 else (16, 32) if each <= 16 else (32, 64) if each <= 64 else (64, 128)
    for up, block_m, n, k, warps, stages in product((True, False), blocks, (32, 64, 128, 256), (64, 128, 256), (4, 8), (3, 4, 5)):
        wide = 2 * n if up else n
        if n > (shape.width if up else shape.hidden) or k > (shape.hidden if up else shape.width):
            continue
        used = stages * (block_m + wide) * k * 2
        accumulators = block_m * wide // (warps * 32)  # registers of a thread
        if 40_000 < used < SHARED_MEMORY and accumulators <= 128 and wide * k >= 8192 and (warps == 4 or accumulators >= 16):
            yield Candidate(shape, up, block_m, ExpertTile(n, k, warps, stages))


def launch(candidate: Candidate, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, routing: Routing) -> None:
    grouped_linear(x, weight, out, routing, candidate.tile, swiglu=candidate.up, pdl=True)


def sizes(candidate: Candidate) -> tuple[tuple[int, ...], int, int]:
    """Shape of the weights, and columns of the input and of the result."""
    s = candidate.shape
    if candidate.up:
        return (s.experts, 2 * s.width, s.hidden), s.hidden, s.width
    return (s.experts, s.hidden, s.width), s.width, s.hidden


def compile_candidate(candidate: Candidate) -> bool:
    """In a worker process: compile into Triton's cache. Returns False if the kernel does not fit the GPU or spills."""
    weights, k, n = sizes(candidate)
    tokens, top_k = 1024, candidate.shape.top_k
    meta = partial(aot_cases.meta, dtype=torch.bfloat16)
    x, out = meta(tokens if candidate.up else tokens * top_k, k), meta(tokens * top_k, n)
    routing = Routing.allocate(tokens, candidate.shape.experts, top_k, candidate.block_m, "meta")
    return aot_compile.fits(lambda: launch(candidate, x, meta(*weights), out, routing))


def fastest(found: list[Candidate], tokens: int, routings: dict[int, Routing]) -> dict[int, tuple[float, ExpertTile]]:
    """Time the candidates of one product: for each block size, the minimum microseconds per layer, and the tile."""
    shape, up = found[0].shape, found[0].up
    size, k, n = sizes(found[0])
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = [torch.randn(*size, **make) * 0.02 for _ in range(LAYERS)]
    x, out = torch.randn(tokens if up else tokens * shape.top_k, k, **make), torch.empty(tokens * shape.top_k, n, **make)
    best: dict[int, tuple[float, ExpertTile]] = {}
    for candidate in found:
        routing = routings[candidate.block_m]

        def layers(candidate: Candidate = candidate, routing: Routing = routing) -> None:
            for weight in weights:
                launch(candidate, x, weight, out, routing)

        us = layer_us(layers, LAYERS)
        if us < best.get(candidate.block_m, (float("inf"),))[0]:
            best[candidate.block_m] = us, candidate.tile
    return best


def measure(shape: ExpertShape, tokens: int, usable: list[Candidate]) -> ExpertConfig:
    """Find the best configuration of a bucket, and print its speed."""
    logits, counts = torch.randn(tokens, shape.experts, device="cuda"), torch.zeros(8, device="cuda", dtype=torch.int64)
    counts[ROWS] = counts[TOKENS] = tokens
    routings = {m: Routing.allocate(tokens, shape.experts, shape.top_k, m, "cuda") for m in {c.block_m for c in usable}}
    for routing in routings.values():
        route(logits, counts, routing, Selection(normalize=True))
    ups, downs = (fastest([c for c in usable if c.up == up], tokens, routings) for up in (True, False))
    block_m = min(ups.keys() & downs.keys(), key=lambda m: ups[m][0] + downs[m][0])
    used = len(torch.unique(routings[block_m].ids))
    for name, (us, tile), halves in (("up", ups[block_m], 2), ("down", downs[block_m], 1)):
        elements = halves * shape.width * shape.hidden
        gbps, tflops = used * elements * 2 / us / 1e3, 2 * tokens * shape.top_k * elements / us / 1e6
        print(f"{tokens:6} tokens {name:5}{us:9.1f} us {gbps:6.0f} GB/s {tflops:6.0f} TFLOP/s  {block_m} {tile}", flush=True)
    return ExpertConfig(block_m, ups[block_m][1], downs[block_m][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192])
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    table = ExpertTable.load(gpu)
    for name, shape in SHAPES.items():
        wanted = {tokens: list(candidates(shape, tokens)) for tokens in arguments.tokens}
        every = list(dict.fromkeys(candidate for found in wanted.values() for candidate in found))
        print(f"{name}: compiling {len(every)} candidates", flush=True)
        usable = set(compiled(compile_candidate, every))
        buckets = table.entries.setdefault(shape.key(torch.bfloat16), {})
        for tokens, found in wanted.items():
            buckets[tokens] = measure(shape, tokens, [candidate for candidate in found if candidate in usable])
    how = f"each product alone, CUDA graph replays over {LAYERS} layers' weights, random routing, dependent launches"
    print(table.save(gpu, about_tables() | {"how": how}))


if __name__ == "__main__":
    main()
