"""Sizes on both sides of each block constant of the kernels.

BLOCKS names, for each constant BLOCK* of each kernel's signature, the axis that it cuts, and a case with this axis as its size.
The constant's value comes from a launch, so a kernel with another value is tested with other sizes.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from support.models.kernel_cases.attention_cases import attention_case, new_tokens_case, rope_case
from support.models.kernel_cases.delta_cases import Rows, hold_case, recurrence_case
from support.models.kernel_cases.draft_cases import following_case, keep_case, stream_case, take_case
from support.models.kernel_cases.expert_cases import experts_case, router_case, routing_case, shared_gate_case
from support.models.kernel_cases.kernel_inputs import draw, header, ints
from support.models.kernel_cases.latent_cases import LatentSizes, latent_case, products_case, rotate_case
from support.models.kernel_cases.layer_cases import (
    embedding_case,
    gather_case,
    layer_inputs_case,
    norm_case,
    quantised_case,
    softcap_case,
    squared_relu_case,
    swiglu_case,
)
from support.models.kernel_cases.linear_cases import linear_case
from support.models.kernel_cases.sampling_cases import sampling_case
from support.models.kernel_cases.space_cases import scan_case
from triton.runtime.interpreter import InterpretedFunction

from blinkpy.kernels.attention.attention import VARIANTS as ATTENTION
from blinkpy.kernels.attention.attention_variants import PagedKV
from blinkpy.kernels.attention.rotate_and_cache import WindowRings, keep_spilled, place_pages
from blinkpy.kernels.delta.recurrence import DeltaSizes
from blinkpy.kernels.delta.state_space import SpaceSizes
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.linear.linear import VARIANTS as LINEAR
from blinkpy.kernels.linear.linear_variants import LinearCase
from blinkpy.kernels.moe.expert_gemv import tiles_of
from blinkpy.kernels.moe.expert_variants import ExpertCase
from blinkpy.kernels.moe.experts import VARIANTS as EXPERTS
from blinkpy.kernels.sampling.sampler import SamplingWorkspace

CPU = "cpu"
Rng = np.random.Generator
Run = Callable[[Rng, torch.dtype, int], None]  # runs a case of a size


class Block(NamedTuple):
    """A constant of a kernel. axis: the dimension that it cuts. run: a case. start: a size that launches the kernel. step: sizes
    are its multiples. most: the case's largest size."""

    kernel: str
    constant: str
    axis: str
    run: Run
    start: int = 24
    step: int = 1
    most: int = 5000

    def sizes(self, rng: Rng, dtype: torch.dtype) -> list[int]:
        """The block, one less and one more, and a little more than two blocks; without sizes that the case does not permit."""
        with launches() as seen:
            self.run(rng, dtype, self.start)
        block = next(options[self.constant] for name, options in seen if name == self.kernel)
        return [size for size in around(block, self.step) if self.step <= size <= self.most]


def around(block: int, step: int = 1) -> list[int]:
    """Sizes on both sides of a block, in multiples of a step."""
    return [block - step, -(-block // step) * step, block // step * step + step, (2 * block // step + 3) * step]


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Names and constants of the kernels launched within the `with` block, in order."""
    seen: list[tuple[str, dict[str, Any]]] = []
    run = InterpretedFunction.run

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.append((self.__name__, options))
        return run(self, *arguments, **options)

    InterpretedFunction.run = noted
    try:
        yield seen
    finally:
        InterpretedFunction.run = run


# ---- layers ------------------------------------------------------------------------------------------------------------


def by_blocks(rng: Rng, dtype: torch.dtype, tokens: int, case: Any, sizes: DeltaSizes | SpaceSizes) -> None:
    """A chunk of a prompt, and decode rows."""
    rows = Rows([tokens, 1, 1, 1], [bool(rng.integers(2)), False, True, False], [3, 0, 6, 1])
    case(rng, CPU, dtype, rows, sizes, last_tokens_only=bool(rng.integers(2)), by_blocks=True)


def quantised(rng: Rng, dtype: torch.dtype, width: int) -> None:
    blocks = bool(rng.integers(2))
    given = None if blocks else float(rng.choice([0.0, 0.01])) or None
    quantised_case(rng, CPU, dtype, tokens=2, bucket=3, width=width, blocks=blocks, given=given)


def rope(rng: Rng, dtype: torch.dtype, head_dim: int) -> None:
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": head_dim, "rotary": head_dim // 4 * 2, "page": 16}
    rope_case(rng, CPU, dtype, norm=bool(rng.integers(2)), tokens=3, bucket=4, **sizes)


def rope_heads(rng: Rng, dtype: torch.dtype, heads: int) -> None:
    """heads: total heads of queries, keys and values."""
    kv_heads = max(1, heads // 4)
    sizes = {"heads": heads - 2 * kv_heads, "kv_heads": kv_heads, "head_dim": 128, "rotary": 128, "page": 16}
    rope_case(rng, CPU, dtype, norm=False, tokens=2, bucket=2, **sizes)


def attention(rng: Rng, dtype: torch.dtype, **changed: int) -> None:
    """A decode row and a chunk. context, chunk: tokens; group: query heads of a key head."""
    sizes = {"context": 40, "chunk": 9, "head_dim": 32, "group": 2} | changed
    chunk, context = sizes["chunk"], max(sizes["context"], sizes["chunk"])
    shape = {"heads": 2 * sizes["group"], "kv_heads": 2, "head_dim": sizes["head_dim"], "page": 16}
    rows = {"bucket_tokens": chunk + 4, "bucket_rows": 3}
    attention_case(rng, CPU, dtype, [1, chunk], [context, context], tiles=ATTENTION["tiles"].plans(dtype)[1], **shape, **rows)


def new_tokens(rng: Rng, dtype: torch.dtype, context: int) -> None:
    """Decode rows that write their own keys."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 16}
    plan = ATTENTION["split"].plans(dtype)[0]
    new_tokens_case(rng, CPU, dtype, [context, max(1, context - 1), context + 1], plan=plan, bucket=4, **shape)


def latent(rng: Rng, dtype: torch.dtype, chunk: int = 9, context: int = 40, **sizes: int) -> None:
    """Latent attention of a decode row and a chunk. sizes: fields of LatentSizes."""
    rows = {"bucket_tokens": chunk + 4, "bucket_rows": 3}
    context = max(chunk, context)
    latent_case(rng, CPU, dtype, [1, chunk], [context, context], LatentSizes(**sizes), **rows)


def latent_products(rng: Rng, dtype: torch.dtype, tokens: int = 5, k: int = 24, n: int = 24) -> None:
    products_case(rng, CPU, dtype, tokens=tokens, bucket=tokens + 2, heads=2, k=k, n=n)


def latent_rotation(rng: Rng, dtype: torch.dtype, **sizes: int) -> None:
    neighbours = bool(rng.integers(2))
    rotate_case(rng, CPU, dtype, LatentSizes(**sizes), tokens=3, bucket=4, neighbours=neighbours)


# ---- rings -------------------------------------------------------------------------------------------------------------


def spilled(rng: Rng, dtype: torch.dtype, elements: int) -> None:
    """Pages of this number of elements: each whole page moves from after the rings to its place, and nothing else changes."""
    slots, rings_pages, layers, tokens = 3, 2, 1, 3
    table, ids = torch.zeros(slots, 8, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    rings = WindowRings(table, ids, 2, rings_pages, layers)
    batch = BatchView(header(1, tokens, 0, CPU), ints([1], CPU), ints([0, tokens], CPU), ints([tokens], CPU), ids, ids, ids)
    kept = slots * rings_pages * layers  # pages of rings, before the spill pages
    sides = [draw(rng, kept + 8, 1, 1, elements, dtype=dtype, device=CPU) for _ in range(2)]
    expected = [side.clone() for side in sides]
    for side in expected:
        side[1 * rings_pages * layers] = side[kept]  # page 2 of the sequence replaces page 0
    keep_spilled(rings, PagedKV(sides[0], sides[1], table), batch, rows=1)
    for side, right in zip(sides, expected, strict=True):
        assert torch.equal(side, right), f"pages of {elements} elements"


def placed(rng: Rng, dtype: torch.dtype, tokens: int) -> None:
    """A prompt of this number of tokens, in pages of one token: its table and the places of its tokens."""
    slots, window = 2, 2 * tokens
    rings = WindowRings(torch.full((slots, tokens + 1), -7, dtype=torch.int32), torch.full((tokens + 2,), -7, dtype=torch.int32),
                        window, window, 1)  # fmt: skip
    ids = torch.zeros(tokens + 2, dtype=torch.int32)
    batch = BatchView(header(1, tokens, 0, CPU), ints([1], CPU), ints([0, tokens], CPU), ints([tokens], CPU), ids, ids, ids)
    place_pages(rings, batch, rows=1, page_size=1)
    pages = window + torch.arange(tokens, dtype=torch.int32)
    assert torch.equal(rings.page_table[1, :tokens], pages) and torch.equal(rings.cache_slots[:tokens], pages)
    rest = torch.cat([rings.page_table[0], rings.page_table[1, tokens:], rings.cache_slots[tokens:]])
    assert bool((rest == -7).all()), "tokens beyond the prompt got a place"


# ---- experts and sampling -------------------------------------------------------------------------------------------------


def routed(rng: Rng, dtype: torch.dtype, **changed: int) -> None:
    """experts, top_k, tokens of a routing in blocks of 16."""
    case = next(case for variant in EXPERTS.values() for case in variant.cases if not case.large)
    sizes = {"experts": 8, "top_k": 2, "tokens": 4} | changed
    sizes["experts"] = max(sizes["experts"], sizes["top_k"])
    shape = replace(case.shape, experts=sizes["experts"], top_k=sizes["top_k"])
    routing_case(rng, CPU, ExpertCase(sizes["tokens"], sizes["tokens"] + 1, shape), 16)


def sampled(rng: Rng, dtype: torch.dtype, vocabulary: int) -> None:
    workspace = SamplingWorkspace.allocate(3, vocabulary, CPU, chunk=64, capacity=32, block=128)
    sampling_case(rng, CPU, rows=2, bucket=3, vocabulary=vocabulary, spread=2.0, workspace=workspace)


def drafts_taken(rng: Rng, dtype: torch.dtype, vocabulary: int) -> None:
    take_case(rng, CPU, vocabulary, mapped=bool(rng.integers(2)))


def _sized(case: Callable[..., None], axis: str, **sizes: int) -> Run:
    """A case with the size as an argument."""
    return lambda rng, dtype, size: case(rng, CPU, dtype, **{**sizes, axis: size})


def softcapped(rng: Rng, dtype: torch.dtype, vocabulary: int) -> None:
    softcap_case(rng, CPU, 2, 3, vocabulary)


BLOCKS = (
    Block("_rms_norm", "BLOCK", "hidden", _sized(norm_case, "hidden", tokens=2, bucket=3)),
    Block("_embed", "BLOCK", "hidden", _sized(embedding_case, "hidden", tokens=2, bucket=3), start=2048),
    Block("_last_tokens", "BLOCK", "hidden", _sized(gather_case, "hidden"), start=2048),
    Block("_swiglu", "BLOCK", "width", _sized(swiglu_case, "width", tokens=2, bucket=3), start=2048),
    Block("_squared_relu", "BLOCK", "width", _sized(squared_relu_case, "width", tokens=2, bucket=3), start=2048),
    Block("_swiglu_rows", "BLOCK", "width", quantised),
    Block("_quantise_rows", "BLOCK", "width", quantised),
    Block("_softcap", "BLOCK", "vocabulary", softcapped),
    Block("_mix_inputs", "BLOCK", "width", _sized(layer_inputs_case, "width", tokens=3, bucket=4)),
    Block("_gate_inputs", "BLOCK", "width", _sized(layer_inputs_case, "width", tokens=3, bucket=4)),
    Block("_rope_and_cache", "BLOCK", "head_dim", rope, most=257),
    Block("_rope_and_cache", "HEADS", "heads", rope_heads, start=8),
    Block("_decode_attention", "BLOCK_N", "context", lambda rng, dtype, n: attention(rng, dtype, context=n)),
    Block(
        "_decode_attention", "BLOCK_D", "head_dim", lambda rng, dtype, n: attention(rng, dtype, head_dim=n), 32, step=8, most=80
    ),
    Block("_decode_attention", "BLOCK_G", "group", lambda rng, dtype, n: attention(rng, dtype, group=n), 4, most=9),
    Block("_decode_attention", "BLOCK_M", "group", lambda rng, dtype, n: attention(rng, dtype, group=n), 4, most=16),
    Block("_decode_attention", "BLOCK_N", "context of new tokens", new_tokens),
    Block("_prefill_attention", "BLOCK_N", "context", lambda rng, dtype, n: attention(rng, dtype, context=n)),
    Block("_prefill_attention", "BLOCK_M", "chunk", lambda rng, dtype, n: attention(rng, dtype, chunk=n, group=1)),
    Block("_prefill_attention", "BLOCK_G", "group", lambda rng, dtype, n: attention(rng, dtype, group=n), 4, most=9),
    Block(
        "_prefill_attention", "BLOCK_D", "head_dim", lambda rng, dtype, n: attention(rng, dtype, head_dim=n), 32, step=8, most=80
    ),
    Block("_head_products", "BLOCK_M", "tokens", lambda rng, dtype, n: latent_products(rng, dtype, tokens=n)),
    Block("_head_products", "BLOCK_N", "outputs", lambda rng, dtype, n: latent_products(rng, dtype, n=n), 300),
    Block("_head_products", "BLOCK_K", "inputs", lambda rng, dtype, n: latent_products(rng, dtype, k=n)),
    Block("_rotate_and_cache", "HEADS", "heads", lambda rng, dtype, n: latent_rotation(rng, dtype, heads=n), 8),
    Block("_rotate_and_cache", "BLOCK_R", "rank", lambda rng, dtype, n: latent_rotation(rng, dtype, rank=n)),
    Block("_rotate_and_cache", "BLOCK_E", "rotated", lambda rng, dtype, n: latent_rotation(rng, dtype, turned=n), step=2),
    *(
        Block(f"_latent_{kind}", constant, axis, run, start, step, most)
        for kind in ("decode", "prefill")
        for constant, axis, run, start, step, most in (
            ("BLOCK_N", "context", lambda rng, dtype, n: latent(rng, dtype, context=n), 24, 1, 5000),
            ("BLOCK_G", "heads", lambda rng, dtype, n: latent(rng, dtype, heads=n), 4, 1, 40),
            ("BLOCK_R", "rank", lambda rng, dtype, n: latent(rng, dtype, rank=n), 24, 1, 5000),
            ("BLOCK_E", "rotated", lambda rng, dtype, n: latent(rng, dtype, turned=n), 24, 2, 5000),
        )
    ),
    Block("_latent_decode", "BLOCK_M", "heads", lambda rng, dtype, n: latent(rng, dtype, heads=n), 4, most=40),
    Block("_latent_prefill", "BLOCK_M", "chunk", lambda rng, dtype, n: latent(rng, dtype, chunk=n, heads=1)),
    Block("_place_pages", "BLOCK", "tokens", placed),
    Block("_keep_spilled", "BLOCK", "elements of a page", spilled, start=100),
    Block("_router", "BLOCK", "hidden", _sized(router_case, "hidden", tokens=2, bucket=2, count=8), start=64),
    Block("_router", "BLOCK_E", "experts", _sized(router_case, "count", tokens=2, bucket=2, hidden=48), start=8),
    Block("_route", "BLOCK_E", "experts", lambda rng, dtype, n: routed(rng, dtype, experts=n), 8),
    Block("_route", "BLOCK_TOP", "top_k", lambda rng, dtype, n: routed(rng, dtype, top_k=n), 3),
    Block("_sort_assignments", "BLOCK_E", "experts", lambda rng, dtype, n: routed(rng, dtype, experts=n), 8),
    Block("_sort_assignments", "BLOCK_M", "tokens", lambda rng, dtype, n: routed(rng, dtype, tokens=n)),
    Block("_sort_assignments", "BLOCK_B", "blocks", lambda rng, dtype, n: routed(rng, dtype, experts=n, tokens=n), 8),
    Block("_gate_shared", "BLOCK", "hidden", _sized(shared_gate_case, "hidden", tokens=2, bucket=3, width=40), start=48),
    Block("_gate_shared", "BLOCK_N", "width", _sized(shared_gate_case, "width", tokens=2, bucket=3, hidden=48), start=1024),
    Block("_adjust", "MASK_BLOCK", "vocabulary", sampled, most=700),
    Block("_sample_tokens", "BLOCK", "vocabulary", sampled, most=700),
    Block("_write_logprobs", "BLOCK", "vocabulary", sampled, most=700),
    Block("_following_tokens", "BLOCK", "tokens", lambda rng, dtype, n: following_case(rng, CPU, n)),
    Block(
        "_recur_blocks",
        "BLOCK",
        "tokens",
        lambda rng, dtype, n: by_blocks(rng, dtype, n, recurrence_case, DeltaSizes(1, 2, 16, 24)),
    ),
    Block("_scan_blocks", "BLOCK", "tokens", lambda rng, dtype, n: by_blocks(rng, dtype, n, scan_case, SpaceSizes(2, 1, 16, 24))),
    Block("_hold", "BLOCK", "rows", lambda rng, dtype, n: hold_case(rng, CPU, n)),
    Block("_keep_rows", "BLOCK", "hidden", _sized(keep_case, "hidden"), start=2048),
    Block("_take_drafts", "BLOCK", "vocabulary", drafts_taken, start=4096, most=9000),
    Block("_take_stream", "BLOCK", "hidden", _sized(stream_case, "hidden"), start=2048),
)
"""Kernels whose launcher sets their block. Kernels of products have blocks from a configuration: see product_edges."""

ELSEWHERE = {("_convolve", "BLOCK"), ("_gate_output", "BLOCK"), ("_copy_states", "BLOCK"), ("_norm_groups", "BLOCK")}
ELSEWHERE |= {(name, "HEADS") for name in ("_recur", "_scan", "_recur_blocks", "_scan_blocks")}
"""Constants that test_delta.py tests on both sides; HEADS are numbers of heads."""
ELSEWHERE |= {("_all_reduce", "BLOCK_"), ("_gather_logits", "BLOCK_")}
"""Constants that test_all_reduce.py tests on both sides."""
PRODUCTS = {"_gemv", "_fp8_gemv", "_fp8_steps", "_linear", "_linear_tma", "_expert_gate_up", "_expert_down", "_expert_linear",
            "_combine", "_packed_gate_up", "_packed_down", "_packed_tiles", "_four_bit_experts", "packed_linear"}  # fmt: skip


def is_routable(experts: int, top_k: int, groups: int) -> bool:
    """Whether a model may have these numbers: its groups have one size, and half of them have enough experts."""
    groups = max(1, groups)
    return experts % groups == 0 and (groups + 1) // 2 * (experts // groups) >= top_k


def product_edges() -> list[tuple[str, Any]]:
    """Cases of linear layers and experts: each case that a variant declares, with each axis in turn around its block."""
    found: list[tuple[str, Any]] = []
    for name, linear in LINEAR.items():
        for case in linear.cases:
            blocks = {"rows": case.config.block_m, "n": case.config.block_n, "k": case.config.block_k}
            for axis, block in blocks.items() if not case.large and linear.kernels else ():
                step = 16 if case.shape.fp8 or name == "tma" else 1
                if case.shape.packed and axis == "k":
                    step = case.shape.group or 8
                shapes = [
                    case.shape._replace(**{axis: size}) for size in around(block, step if axis != "rows" else 1) if size > 0
                ]
                found += [(f"{name} {axis}", LinearCase(case.config, shape)) for shape in shapes if linear.supports(shape)]
    for name, experts in EXPERTS.items():
        for expert in experts.cases:
            up, down = (tile.block_k for tile in tiles_of(expert.shape, expert.bucket)) if name == "gemv" else (128, 64)
            axes = {"hidden": up, "width": down, "experts": 8} if not expert.large else {}
            for axis, block in axes.items():
                step = 1 if axis == "experts" else max(32, expert.shape.group)
                for size in around(block, step):
                    shape = replace(expert.shape, **{axis: size})
                    if is_routable(shape.experts, shape.top_k, expert.groups) and experts.supports(shape, expert.bucket):
                        found.append((f"{name} {axis}", expert._replace(shape=shape)))
    return found


def run_product(rng: Rng, dtype: torch.dtype, name: str, case: LinearCase | ExpertCase) -> None:
    """Run a case of product_edges."""
    if isinstance(case, LinearCase):
        linear_case(rng, CPU, case.config, case.shape)
    else:
        experts_case(rng, CPU, dtype, name.partition(" ")[0], case)
