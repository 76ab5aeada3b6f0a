"""The Triton kernels on a GPU, at the sizes of real models, against the float64 reference."""

from typing import Any

import numpy as np
import pytest
import torch
from support.models.kernel_cases.attention_cases import attention_case, new_tokens_case, rope_case
from support.models.kernel_cases.delta_cases import (
    LOG_RATES,
    Rows,
    convolution_case,
    copy_case,
    drafting_case,
    drawn_rows,
    gate_case,
    long_rows,
    recurrence_case,
)
from support.models.kernel_cases.expert_cases import experts_case, router_case, routing_case
from support.models.kernel_cases.kernel_inputs import draw, header
from support.models.kernel_cases.latent_cases import LatentSizes, latent_case, products_case, rotate_case
from support.models.kernel_cases.layer_cases import (
    embedding_case,
    gather_case,
    last_token_case,
    layer_inputs_case,
    norm_case,
    quantised_case,
    softcap_case,
    squared_relu_case,
    swiglu_case,
)
from support.models.kernel_cases.linear_cases import linear_case
from support.models.kernel_cases.sampling_cases import sampling_case
from support.models.kernel_cases.space_cases import group_norm_case, scan_case

from blinkpy.config import ConfigError
from blinkpy.kernels.attention.attention_variants import DecodePlan, plan_decode
from blinkpy.kernels.attention.latent_attention import plan_latent
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.delta.delta_blocks import DELTA_BLOCK
from blinkpy.kernels.delta.recurrence import DeltaSizes
from blinkpy.kernels.delta.space_blocks import SPACE_BLOCK
from blinkpy.kernels.delta.state_space import SpaceSizes
from blinkpy.kernels.linear.linear import VARIANTS, check_config, linear, writes_partials
from blinkpy.kernels.linear.linear_table import LinearTable, default_config
from blinkpy.kernels.linear.linear_variants import WORDS, LinearCall, LinearConfig, LinearShape, LinearWorkspace
from blinkpy.kernels.moe.expert_variants import ExpertCase, ExpertShape, ExpertTable
from blinkpy.kernels.moe.experts import VARIANTS as EXPERTS
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.sampling.sampler import VARIANTS as SAMPLERS
from blinkpy.kernels.sampling.sampler import SamplingWorkspace

CUDA = "cuda"
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SHAPES = [
    LLAMA | {"page": 16},
    {"heads": 32, "kv_heads": 4, "head_dim": 128, "page": 64},  # Qwen3-30B-A3B
    {"heads": 40, "kv_heads": 10, "head_dim": 128, "page": 32},  # Phi-4
    {"heads": 32, "kv_heads": 32, "head_dim": 96, "page": 16},  # Phi-3-mini
    {"heads": 14, "kv_heads": 2, "head_dim": 64, "page": 16},  # Qwen2-0.5B
    {"heads": 8, "kv_heads": 4, "head_dim": 32, "page": 16},  # the demonstration model
    {"heads": 16, "kv_heads": 1, "head_dim": 128, "page": 16, "window": 300},
    {"heads": 16, "kv_heads": 8, "head_dim": 256, "page": 16, "window": 300, "cap": 1.0},  # Gemma 2
    {"heads": 64, "kv_heads": 8, "head_dim": 64, "page": 16, "window": 128, "sinks": True},  # gpt-oss
    {"heads": 40, "kv_heads": 8, "head_dim": 128, "page": 16, "window": 256, "chunked": True},  # Llama 4
]


@both_dtypes
@pytest.mark.parametrize("hidden", [256, 2048, 4096, 5120, 3000])
def test_norm(rng: np.random.Generator, dtype: torch.dtype, hidden: int) -> None:
    norm_case(rng, CUDA, dtype, tokens=61, bucket=64, hidden=hidden)
    last_token_case(rng, CUDA, dtype, hidden=hidden)
    gather_case(rng, CUDA, dtype, hidden=hidden)


@both_dtypes
@pytest.mark.parametrize(("shape", "norm", "rotary"), [(0, False, 128), (1, True, 128), (3, False, 96), (2, False, 96)])
def test_rope(rng: np.random.Generator, dtype: torch.dtype, shape: int, norm: bool, rotary: int) -> None:
    for period in (0, 11):  # period of growing queries
        rope_case(rng, CUDA, dtype, norm=norm, rotary=rotary, tokens=37, bucket=48, period=period, **SHAPES[shape])


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_a_mixed_batch(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    lengths = [1] * 9 + [300, 77, 2, 128, 33]
    contexts = [1, 63, 64, 65, 129, 1000, 2500, 17, 16, 300, 900, 2, 1128, 512]
    for overlap in (False, True):
        attention_case(rng, CUDA, dtype, lengths, contexts, overlap=overlap, bucket_tokens=640, bucket_rows=32, **shape)


@both_dtypes
@pytest.mark.parametrize(
    ("shape", "norm", "rotary"),
    [
        *((0, False, 128), (1, True, 128), (3, False, 96), (4, False, 64), (6, True, 96), (7, False, 256), (8, False, 64)),
        (9, True, 128),
    ],
)
@pytest.mark.parametrize("rows", [1, 13, 64])
def test_attention_with_new_tokens(
    rng: np.random.Generator, dtype: torch.dtype, shape: int, norm: bool, rotary: int, rows: int
) -> None:
    contexts = [*rng.integers(1, 3000, rows - 1).tolist(), 1200][:rows]
    sizes = SHAPES[shape]
    sm_count, dim = torch.cuda.get_device_properties(0).multi_processor_count, sizes["head_dim"]
    group = sizes["heads"] // sizes["kv_heads"]
    plan = plan_decode(rows, sizes["kv_heads"], 4096, sm_count, dtype, head_dim=dim, group=group)
    few = DecodePlan(splits=8, min_tiles=1, block_n=32)
    for chosen in (plan, few):
        period = int(rng.integers(2)) * 500
        new_tokens_case(
            rng, CUDA, dtype, contexts, norm=norm, rotary=rotary, plan=chosen, bucket=rows + 3, period=period, **sizes
        )


@both_dtypes
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 2, 512), (16, 1, 512), (8, 2, 512), (32, 16, 256), (6, 2, 320)])
def test_heads_of_gemma_4(
    rng: np.random.Generator, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, fp8: bool
) -> None:
    """With the plans of its steps, and norms of values."""
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page": 16, "fp8": fp8}
    lengths, contexts = [1] * 9 + [300, 77, 2, 128, 33], [1, 63, 64, 65, 129, 1000, 2500, 17, 16, 300, 900, 2, 1128, 512]
    group, sm_count = heads // kv_heads, torch.cuda.get_device_properties(0).multi_processor_count
    sizes: dict[str, Any] = {"head_dim": head_dim, "group": group, "fp8": fp8}
    for overlap in (False, True):
        plan = plan_decode(32, kv_heads, 4096, sm_count, dtype, mixed=overlap, **sizes)
        tiles = plan_prefill(dtype, sm_count, head_dim=head_dim)
        attention_case(
            rng,
            CUDA,
            dtype,
            lengths,
            contexts,
            overlap=overlap,
            plan=plan,
            tiles=tiles,
            bucket_tokens=640,
            bucket_rows=32,
            **shape,
        )
    more: dict[str, Any] = {"norm": True, "rotary": head_dim, "value_norm": True}
    rope_case(rng, CUDA, dtype, tokens=37, bucket=48, **more, **shape)
    for rows in (1, 13, 64, 200):
        plan, some = (
            plan_decode(rows, kv_heads, 4096, sm_count, dtype, **sizes),
            [*rng.integers(1, 3000, rows - 1).tolist(), 1200],
        )
        new_tokens_case(rng, CUDA, dtype, some[-rows:], plan=plan, bucket=rows + 3, **more, **shape)


@both_dtypes
@pytest.mark.parametrize(
    ("shape", "norm", "rotary"), [(0, False, 128), (1, True, 128), (3, False, 96), (7, False, 256), (8, False, 64)]
)
def test_fp8_cache(rng: np.random.Generator, dtype: torch.dtype, shape: int, norm: bool, rotary: int) -> None:
    sizes, contexts = SHAPES[shape], [1, 63, 64, 65, 129, 1000, 2500, 17, 16, 300, 900, 2, 1128, 512]
    parts = {name: sizes[name] for name in ("heads", "kv_heads", "head_dim", "page")}
    rope_case(rng, CUDA, dtype, norm=norm, rotary=rotary, tokens=37, bucket=48, fp8=True, **parts)
    lengths = [1] * 9 + [300, 77, 2, 128, 33]
    for overlap in (False, True):
        attention_case(rng, CUDA, dtype, lengths, contexts, overlap=overlap, bucket_tokens=640, bucket_rows=32, fp8=True, **sizes)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for rows in (1, 13, 64):
        group = sizes["heads"] // sizes["kv_heads"]
        plan = plan_decode(rows, sizes["kv_heads"], 4096, sm_count, dtype, head_dim=sizes["head_dim"], group=group, fp8=True)
        some = [*rng.integers(1, 3000, rows - 1).tolist(), 1200]
        new_tokens_case(rng, CUDA, dtype, some, norm=norm, rotary=rotary, plan=plan, bucket=rows + 3, fp8=True, **sizes)


@pytest.mark.parametrize("context", [1, 64, 8192, 40_000])
def test_one_long_sequence(rng: np.random.Generator, context: int) -> None:
    plan = plan_decode(1, 8, 40_960, torch.cuda.get_device_properties(0).multi_processor_count)
    for dtype in (torch.bfloat16, torch.float32):
        attention_case(rng, CUDA, dtype, [1], [context], page=16, plan=plan, bucket_tokens=1, bucket_rows=1, **LLAMA)


def test_many_decode_rows(rng: np.random.Generator) -> None:
    contexts = rng.integers(1, 3000, 200).tolist()
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    plan, mixed = (plan_decode(256, 8, 8192, sm_count, mixed=mixed) for mixed in (False, True))
    for chosen in (plan, mixed, DecodePlan(splits=2, min_tiles=1, block_n=64)):
        attention_case(
            rng, CUDA, torch.bfloat16, [1] * 200, contexts, page=16, plan=chosen, overlap=chosen.overlap_prefill,
            bucket_tokens=256, bucket_rows=256, **LLAMA,
        )  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("heads", [16, 20, 64, 128])  # DeepSeek-V2-Lite's, GLM-4.7-Flash's, Kimi K2's, DeepSeek-V3's
@pytest.mark.parametrize("rank", [512, 256])  # 256: Mistral Small 4
def test_latent_attention(rng: np.random.Generator, dtype: torch.dtype, heads: int, rank: int) -> None:
    lengths, contexts = [1] * 9 + [300, 77, 2, 128, 33], [1, 63, 64, 65, 129, 1000, 2500, 17, 16, 300, 900, 2, 1128, 512]
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, page in ((32, 16), (256, 64)):
        plans = plan_latent(rows, heads, 4096, sm_count, dtype)
        latent_case(
            rng, CUDA, dtype, lengths, contexts, LatentSizes(heads, rank, 128, 64, page), decode=plans.decode,
            chunks=plans.chunks, bucket_tokens=640, bucket_rows=rows,
        )  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_latent_tokens(rng: np.random.Generator, dtype: torch.dtype, neighbours: bool, grows: bool) -> None:
    for heads in (16, 20, 128):
        sizes = LatentSizes(heads, 512, 128, 64)
        rotate_case(rng, CUDA, dtype, sizes, tokens=61, bucket=64, neighbours=neighbours, grows=grows)
        for tokens, bucket in ((1, 1), (13, 16), (300, 512)):
            shape = {"heads": heads, "tokens": tokens, "bucket": bucket, "grows": grows}
            products_case(rng, CUDA, dtype, k=128, n=512, transposed=neighbours, **shape)
            products_case(rng, CUDA, dtype, k=512, n=128, transposed=not neighbours, **shape)


DELTA_SIZES = [DeltaSizes(16, 32, 128, 128), DeltaSizes(16, 16, 128, 128), DeltaSizes(16, 64, 128, 128)]  # Qwen3-Next, Qwen3.5


@both_dtypes
@pytest.mark.parametrize("longest", [1, 3, 70])
def test_short_convolution(rng: np.random.Generator, dtype: torch.dtype, longest: int) -> None:
    for channels in (8192, 6144, 130):
        convolution_case(rng, CUDA, dtype, drawn_rows(rng, longest), channels=channels, taps=4)
    for last_tokens_only in (False, True):
        rows = drawn_rows(rng, longest)
        convolution_case(rng, CUDA, dtype, rows, channels=2048, taps=3, gated=True, last_tokens_only=last_tokens_only)


@both_dtypes
@pytest.mark.parametrize("sizes", DELTA_SIZES, ids=str)
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_delta_recurrence(rng: np.random.Generator, dtype: torch.dtype, sizes: DeltaSizes, last_tokens_only: bool) -> None:
    for rows in (Rows([1] * 4, [True, False, True, False], [2, 0, 6, 3]), drawn_rows(rng, 40)):
        recurrence_case(rng, CUDA, dtype, rows, sizes, last_tokens_only=last_tokens_only)
        gate_case(rng, CUDA, dtype, rows, width=4096, last_tokens_only=last_tokens_only)
    for decays in LOG_RATES if dtype == torch.bfloat16 else ():  # no kernel computes float32 by blocks
        how = {"decays": decays, "alike": bool(rng.integers(2)), "by_blocks": True}
        rows = long_rows(rng, DELTA_BLOCK)
        print(decays, recurrence_case(rng, CUDA, dtype, rows, sizes, last_tokens_only=last_tokens_only, **how))


@both_dtypes
@pytest.mark.parametrize(
    "sizes",
    [SpaceSizes(48, 1, 128, 64), SpaceSizes(24, 1, 256, 64), SpaceSizes(128, 8, 128, 80), SpaceSizes(8, 2, 20, 16)],
    ids=str,
)
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_state_space(rng: np.random.Generator, dtype: torch.dtype, sizes: SpaceSizes, last_tokens_only: bool) -> None:
    for rows in (Rows([1] * 4, [True, False, True, False], [2, 0, 6, 3]), drawn_rows(rng, 40)):
        scan_case(rng, CUDA, dtype, rows, sizes, last_tokens_only=last_tokens_only)
    for decays in LOG_RATES if dtype == torch.bfloat16 else ():
        how = {"decays": decays, "by_blocks": True}
        print(decays, scan_case(rng, CUDA, dtype, long_rows(rng, SPACE_BLOCK), sizes, last_tokens_only=last_tokens_only, **how))
    group_norm_case(rng, CUDA, dtype, groups=sizes.groups, size=sizes.heads // sizes.groups * sizes.value_dim)


@both_dtypes
@pytest.mark.parametrize("sizes", [DeltaSizes(2, 4, 128, 128), DeltaSizes(1, 3, 20, 16)])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_delta_states_follow_correct_drafts(rng: np.random.Generator, dtype: torch.dtype, sizes: DeltaSizes, drafts: int) -> None:
    assert drafting_case(rng, CUDA, dtype, sizes, taps=4, drafts=drafts, steps=30) > 0


@both_dtypes
@pytest.mark.parametrize("save", [False, True])
def test_copies_of_states(rng: np.random.Generator, dtype: torch.dtype, save: bool) -> None:
    copy_case(rng, CUDA, dtype, layers=30, matrix=(32, 128, 128), taken=(3, 8192), drafts=3, save=save)
    copy_case(rng, CUDA, dtype, layers=2, matrix=(3, 33, 9), taken=(1, 130), drafts=0, save=save)
    copy_case(rng, CUDA, dtype, layers=10, matrix=(0, 0, 0), taken=(2, 2048), drafts=3, save=save)


@both_dtypes
def test_swiglu_and_embedding(rng: np.random.Generator, dtype: torch.dtype) -> None:
    for width in (14_336, 17_920, 704, 333):
        swiglu_case(rng, CUDA, dtype, tokens=60, bucket=64, width=width)
        squared_relu_case(rng, CUDA, dtype, tokens=60, bucket=64, width=width)
    for hidden in (4096, 5120, 250):
        embedding_case(rng, CUDA, dtype, tokens=60, bucket=64, hidden=hidden)
        layer_inputs_case(rng, CUDA, dtype, tokens=60, bucket=64, width=hidden // 8)
    softcap_case(rng, CUDA, rows=60, bucket=64, vocabulary=256_000)


LAYERS = [
    LinearShape(0, 6144, 4096, norm=True, bias=True),
    LinearShape(0, 4096, 4096, residual=True),
    LinearShape(0, 14_336, 4096, norm=True, swiglu=True),
    LinearShape(0, 14_336, 3584, norm=True, swiglu=True, gelu=True),
    LinearShape(0, 4096, 14_336, residual=True),
    LinearShape(0, 1000, 1300, residual=True, bias=True),
]


def passes(config: LinearConfig, shape: LinearShape) -> bool:
    """Whether a configuration declared for another shape passes its check for this shape."""
    try:
        check_config(config, shape)
    except ConfigError:
        return False
    return True


@both_dtypes
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16, 31, 64, 128, 200])
def test_linear(rng: np.random.Generator, dtype: torch.dtype, layer: LinearShape, m: int) -> None:
    """With the default, the GPU's table, and the configurations that variants declare for real sizes."""
    shape = layer._replace(rows=m, dtype=dtype)
    table = LinearTable.load(torch.cuda.get_device_name())
    configs = {default_config(shape._replace(norm=False)), table.config(shape._replace(norm=False))}
    for variant in VARIANTS.values():
        cases_of_it = [case for case in variant.cases if case.large and not case.shape.fp8]
        configs |= {case.config for case in cases_of_it if variant.supports(shape) and passes(case.config, shape)}
    for config in configs:
        if writes_partials(config):
            linear_case(rng, CUDA, config, LinearShape(m, shape.n, shape.k, partials=True, dtype=dtype))
        else:
            linear_case(rng, CUDA, config, shape)


@both_dtypes
@pytest.mark.parametrize("name", VARIANTS)
def test_cases_of_a_linear_variant(rng: np.random.Generator, dtype: torch.dtype, name: str) -> None:
    for case in VARIANTS[name].cases:
        shape = case.shape._replace(inputs=dtype) if case.shape.packed else case.shape._replace(dtype=dtype)
        if not case.shape.fp8 and VARIANTS[name].supports(shape):
            if shape.packed and dtype == torch.float32 and not passes(case.config, shape):
                continue  # unpacked float32 weights of a large tile do not fit a multiprocessor
            linear_case(rng, CUDA, case.config, shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_fp8_cases_of_a_linear_variant(rng: np.random.Generator, name: str) -> None:
    for case in VARIANTS[name].cases:
        if case.shape.fp8:
            linear_case(rng, CUDA, case.config, case.shape)


FP8_LAYERS = [layer._replace(norm=False, dtype=torch.float8_e4m3fn) for layer in LAYERS]
FP8_LAYERS += [layer._replace(blocks=True) for layer in FP8_LAYERS]


@pytest.mark.parametrize("layer", FP8_LAYERS, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16, 31, 64, 200, 1500])
def test_fp8_linear(rng: np.random.Generator, layer: LinearShape, m: int) -> None:
    """With the default, and the entries of the GPU's table."""
    shape, table = layer._replace(rows=m), LinearTable.load(torch.cuda.get_device_name())
    for config in {default_config(shape), table.config(shape)}:
        if writes_partials(config):
            linear_case(rng, CUDA, config, shape._replace(partials=True, bias=False, residual=False))
        else:
            linear_case(rng, CUDA, config, VARIANTS[config.variant].given(shape))


PACKED_FORMS = [{"group": 128}, {"group": 32}, {"group": 0}, {"group": 128, "ordered": True}, {"group": 16, "fp4": True}]


@pytest.mark.parametrize("form", PACKED_FORMS, ids=str)
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer.k % 128 == 0], ids=str)
@pytest.mark.parametrize("m", [1, 8, 31, 64, 200])
def test_packed_linear(rng: np.random.Generator, layer: LinearShape, m: int, form: dict[str, Any]) -> None:
    """4-bit weights with the default."""
    shape = layer._replace(rows=m, norm=False, dtype=WORDS, inputs=torch.bfloat16, **form)
    linear_case(rng, CUDA, default_config(shape), shape)


@both_dtypes
@pytest.mark.parametrize("width", [4096, 14_336, 5120, 250])
@pytest.mark.parametrize(("blocks", "given"), [(False, None), (True, None), (False, 0.02)])
def test_quantised_rows(rng: np.random.Generator, dtype: torch.dtype, width: int, blocks: bool, given: float | None) -> None:
    quantised_case(rng, CUDA, dtype, tokens=29, bucket=32, width=width, blocks=blocks, given=given)


def test_logits(rng: np.random.Generator) -> None:
    for m in (1, 17, 128):
        shape = LinearShape(m, 128_256, 1024, result=torch.float32)
        linear_case(rng, CUDA, default_config(shape), shape)


@both_dtypes
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, variant in EXPERTS.items() for case in variant.cases])
def test_experts(rng: np.random.Generator, dtype: torch.dtype, name: str, case: ExpertCase) -> None:
    """With the case's tiles, and the tiles measured for a larger shape of the same kind."""
    measured = ExpertTable.load("NVIDIA H200").config(ExpertShape(128, 8, 2048, 768), case.bucket, dtype)
    for config in (None, measured) if case.large else (None,):
        experts_case(rng, CUDA, dtype, name, case, config)
    routing_case(rng, CUDA, case, measured.block_m)


@both_dtypes
@pytest.mark.parametrize(("tokens", "bucket", "hidden"), [(1, 1, 2048), (37, 64, 2048), (3, 4, 5000)])
def test_router(rng: np.random.Generator, dtype: torch.dtype, tokens: int, bucket: int, hidden: int) -> None:
    router_case(rng, CUDA, dtype, tokens=tokens, bucket=bucket, count=128, hidden=hidden)


@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 151_936, 200_064])
@pytest.mark.parametrize(("spread", "ties"), [(1.0, False), (4.0, False), (2.0, True)])
@pytest.mark.parametrize("variant", SAMPLERS)
def test_sampling(rng: np.random.Generator, vocabulary: int, spread: float, ties: bool, variant: str) -> None:
    """The kernel sums weights in float32, so its uniform number may have an error of a few parts in a million. One row may also
    be on the other side of a filter's boundary."""
    workspace = SamplingWorkspace.allocate(64, vocabulary, CUDA)
    sampling_case(
        rng, CUDA, rows=60, bucket=64, vocabulary=vocabulary, spread=spread, ties=ties, workspace=workspace,
        history=2000, mismatches=1, slack=1e-5, variant=variant,
    )  # fmt: skip


def test_captured_chain_with_dependent_launches(rng: np.random.Generator) -> None:
    """A chain of layers as a CUDA graph, with and without programmatic dependent launch: bit-equal, replay after replay."""
    hidden, layers, rows = 1024, 24, 4
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    weights = [draw(rng, hidden, hidden, scale=hidden**-0.5, **make) for _ in range(layers)]
    scale = torch.ones(hidden, **make)
    start = draw(rng, rows, hidden, **make)
    counts = header(rows, rows, rows, CUDA)
    workspace = LinearWorkspace.allocate(CUDA, torch.bfloat16)
    config = LinearConfig(block_n=32, block_k=128, split_k=4)
    state, normed = start.clone(), torch.empty_like(start)

    def chain(pdl: bool) -> None:
        for weight in weights:
            rms_norm(state, scale, 1e-5, counts, normed, pdl=pdl)
            linear(LinearCall(normed, weight, state, workspace, counts, residual=state, pdl=pdl), config)

    chain(False)
    expected = state.clone()
    for pdl in (False, True):
        state.copy_(start)
        chain(pdl)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(pdl)
        for _ in range(50):
            state.copy_(start)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(state, expected), f"pdl {pdl}"
