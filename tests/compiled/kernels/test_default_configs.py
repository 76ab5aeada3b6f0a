"""Properties: for any shape, defaults pass their checks, and attention's plans fit a multiprocessor."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkpy.config import ConfigError
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT
from blinkpy.kernels import MAX_EXPERTS, MAX_FP8_WIDTH, MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM
from blinkpy.kernels.attention.attention_variants import plan_decode
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.fp8_rows import MOST_COLUMNS, row_pieces, row_warps
from blinkpy.kernels.linear.linear import VARIANTS, check_config
from blinkpy.kernels.linear.linear_table import InvariantLinearTable, LinearTable, default_config, key, shape_of
from blinkpy.kernels.linear.linear_variants import WORDS, LinearConfig, LinearShape
from blinkpy.kernels.moe.expert_variants import (
    ExpertShape,
    ExpertTable,
    InvariantExpertTable,
    check_expert_config,
    default_expert_config,
    tile_needs,
)
from blinkpy.kernels.quantised_matrices import FP8

DTYPES = (torch.bfloat16, torch.float32)
SIZES = st.one_of(st.integers(1, 70_000), st.integers(1, 2300).map(lambda n: 32 * n), st.integers(4, 16).map(lambda n: 1 << n))
ROWS = st.one_of(st.integers(1, 300), st.integers(1, 16_384))


@st.composite
def linear_shapes(draw: st.DrawFn) -> LinearShape:
    activations = draw(st.sampled_from(DTYPES))
    shape = LinearShape(
        draw(ROWS), draw(SIZES), draw(st.integers(1, MAX_FP8_WIDTH)), swiglu=draw(st.booleans()), dtype=activations
    )
    if draw(st.booleans()):
        shape = shape._replace(k=draw(SIZES.filter(lambda k: k <= MAX_FP8_WIDTH)))
    if draw(st.booleans()):
        return shape._replace(dtype=FP8, result=activations, blocks=draw(st.booleans()))
    if draw(st.booleans()):
        group, fp4 = draw(st.sampled_from((0, 32, 64, 128))), draw(st.booleans())
        unit = 16 if fp4 else group or 8
        shape = shape._replace(k=max(unit, shape.k // unit * unit), ordered=draw(st.booleans()))
        return shape._replace(dtype=WORDS, inputs=activations, fp4=fp4, group=16 if fp4 else group)
    return shape


@given(linear_shapes())
def test_defaults_of_linear_layers_pass_their_check(shape: LinearShape) -> None:
    for table in (LinearTable(), InvariantLinearTable()):
        config = table.config(shape)
        check_config(config, shape)
        sizes = (config.block_m, config.block_k, config.warps) + (() if config.variant == "tma" else (config.block_n,))
        assert not any(size & (size - 1) for size in sizes)
        assert (
            not (shape.fp8 and shape.blocks and VARIANTS[config.variant].kernels and config.variant != "fp8_gemv")
            or config.block_k <= 128
        )
    every = {InvariantLinearTable().config(shape._replace(rows=rows)) for rows in (1, 2, 64, 65, 4096)}
    assert len(every) == 1, "a batch-invariant layer has one configuration"
    stored = {"result": None, "inputs": None, "ordered": False, "blocks": shape.blocks and shape.fp8}
    assert shape_of(key(shape)) == shape._replace(**stored)


@given(linear_shapes(), st.data())
def test_what_is_not_a_power_of_two_is_no_configuration(shape: LinearShape, data: st.DataObject) -> None:
    config, odd = default_config(shape), data.draw(st.integers(3, 255).filter(lambda n: n & (n - 1)))
    for field in ("block_m", "block_k", "warps"):
        with pytest.raises(ConfigError, match=field):
            replace(config, **{field: min(odd, 31) if field == "warps" and odd > 31 else odd})
    if VARIANTS[config.variant].kernels:
        with pytest.raises(ConfigError, match="block_n"):
            check_config(replace(config, block_n=odd), shape)


EXPERTS = st.builds(
    ExpertShape,
    experts=st.integers(1, MAX_EXPERTS),
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 1024).map(lambda n: 32 * n),
    width=st.integers(1, 1024).map(lambda n: 32 * n),
    gated=st.booleans(),
)


@given(EXPERTS, st.sampled_from(["", "rows", "blocks", "mxfp4", "fp4", "int4 32", "int4 0"]), ROWS, st.sampled_from(DTYPES))
def test_defaults_of_experts_pass_their_check(shape: ExpertShape, form: str, tokens: int, dtype: torch.dtype) -> None:
    four = form if form.endswith("4") or "int4" in form else ""
    shape = replace(shape, mxfp4=four == "mxfp4", fp8="" if four else form, top_k=min(shape.top_k, shape.experts))
    shape = replace(shape, packed="" if shape.mxfp4 else four, gated=shape.gated or shape.mxfp4)
    config = default_expert_config(shape, tokens, dtype)
    check_expert_config(config, shape, dtype)
    for tile, up in ((config.up, True), (config.down, False)):
        needs = tile_needs(config.block_m, tile, shape, dtype, up=up)
        assert 0 < needs.shared <= SHARED_MEMORY_LIMIT[90]
        assert 0 < needs.registers(tile.warps) <= 255
    assert len({InvariantExpertTable().config(shape, rows, dtype) for rows in (1, 64, 4096)}) == 1
    assert ExpertShape.of_key(shape.key(dtype)) == (shape, dtype)
    assert ExpertTable().config(shape, tokens, dtype) == config


@given(
    rows=ROWS,
    kv_heads=st.integers(1, 128),
    context=st.integers(1, 1 << 21),
    head_dim=st.integers(MIN_HEAD_DIM, MAX_HEAD_DIM),
    group=st.integers(1, MAX_GROUP),
    dtype=st.sampled_from(DTYPES),
    mixed=st.booleans(),
    fp8=st.booleans(),
    sm_count=st.integers(1, 200),
)
def test_plans_of_attention_pass_their_check(
    rows: int,
    kv_heads: int,
    context: int,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    mixed: bool,
    fp8: bool,
    sm_count: int,
) -> None:
    """A plan is checked at its creation, for its heads."""
    plan = plan_decode(rows, kv_heads, context, sm_count, dtype, mixed=mixed, head_dim=head_dim, group=group, fp8=fp8)
    assert plan.splits <= 64
    plan.check_needs(head_dim, group, dtype, fp8=fp8)
    for every_row in (False, True):
        prefill = plan_prefill(dtype, sm_count, head_dim=head_dim, every_row=every_row)
        assert prefill.block_m >= MAX_GROUP
        prefill.check_needs(head_dim, dtype, fp8=fp8)


@settings(max_examples=30)
@given(st.one_of(st.integers(1, MAX_FP8_WIDTH), st.integers(MOST_COLUMNS - 2, MOST_COLUMNS + 2)), st.booleans())
def test_programs_hold_the_columns_of_a_row(width: int, whole: bool) -> None:
    block, programs, pieces = row_pieces(width, whole=whole)
    assert not block & (block - 1)
    assert width <= block * programs * pieces < width + max(block, width, 128), "all columns once, and no idle piece"
    assert block // (32 * row_warps(block)) <= (64 if pieces == 1 else 32), "numbers of a thread"
    assert (programs == 1) if whole else (pieces == 1)


def test_a_configuration_of_another_variant_is_refused() -> None:
    shape = LinearShape(64, 4096, 4096)
    for config, words in (
        (LinearConfig("none"), "unknown variant"),
        (LinearConfig("gemv"), "does not support"),
        (LinearConfig("triton", block_k=256), ""),
        (LinearConfig("triton", 64, 256, 256, stages=5), "shared memory"),
        (LinearConfig("triton", 256, 512, 16, stages=1), "registers"),
    ):
        if words:
            with pytest.raises(ConfigError, match=words):
                check_config(config, shape)
        else:
            check_config(config, shape)
    with pytest.raises(ConfigError, match="block_k 256 exceeds 128"):
        check_config(LinearConfig("triton", block_k=256), shape._replace(dtype=FP8, blocks=True))


def test_steps_over_packed_inputs_stay_within_their_scales() -> None:
    shape = LinearShape(8, 4096, 4096, dtype=WORDS, inputs=torch.bfloat16, group=64)
    for changed, config, words in (
        ({}, LinearConfig("packed", block_k=128), "divide the 64 inputs that share a scale"),
        ({}, LinearConfig("packed", block_k=16), "must be at least 32"),
        ({"fp4": True, "group": 16}, LinearConfig("packed", block_k=256), "must be 64 or 128"),
        ({"group": 16}, LinearConfig("packed", block_k=32), "does not support"),
        ({"k": 4100, "group": 0}, LinearConfig("packed", block_k=32), "does not support"),
        ({}, LinearConfig("triton", block_k=64), "does not support"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_config(config, shape._replace(**changed))


def test_splits_stay_within_the_workspace() -> None:
    """Llama-3.1-405B's query, key and value heads, FP8: four splits would need more partial sums than a workspace has."""
    shape = LinearShape(64, 18_432, 16_384, dtype=FP8, result=torch.bfloat16)
    config = default_config(shape)
    assert config.split_k == 2
    with pytest.raises(ConfigError, match="partial sums"):
        check_config(replace(config, split_k=4), shape)
