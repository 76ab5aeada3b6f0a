"""The GPU's decoder and sampler in the interpreter, against the CPU engine's step."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.models import fp8_reference, logits, model_zoo, step_cases
from support.models.draft_heads import save_drafting_model
from support.models.eagle_heads import save_head
from support.models.fp8_checkpoints import compressed, save_fp8
from support.models.packed_checkpoints import FORMS, packed_weights, save_packed
from support.models.redrawn_cases import redrawn_at_ties
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearConfig
from blinkpy.kernels.norm import last_tokens
from blinkpy.models.families.family import describe_model
from blinkpy.models.gpu import gpu_decoder
from blinkpy.models.gpu.gpu_buffers import ResidualStream
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import load_weights

SEED = int(os.environ["BLINKPY_SEED"])  # set by conftest.py


TABLES = {name: getattr(step_cases, f"{name}_TABLE") for name in ("SPLIT", "CUBLAS", "TMA")} | {"default": LinearTable()}


@pytest.mark.parametrize("table", part_of(TABLES, 4))
@redrawn_at_ties
def test_step(rng: np.random.Generator, tmp_path: Path, table: str) -> None:
    dtype, limit = (torch.bfloat16, 3e-2) if table == "TMA" else (torch.float32, 1e-4)
    assert step_cases.step_case(rng, "cpu", "llama3", tmp_path, dtype, steps=3, table=TABLES[table]) < limit


@pytest.mark.parametrize("name", part_of(["smollm3-window", "gemma4-nested", "gemma4-e"]))
@redrawn_at_ties
def test_steps_over_an_fp8_cache(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    """Both engines measure the same scales; with them, steps with decode rows only, and with chunks."""
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=3, fp8_cache=True) < 3e-2


def test_a_step_from_a_snapshot(rng: np.random.Generator, tmp_path: Path) -> None:
    name = ("qwen3-next", "qwen3.5", "lfm2", "granite4-h", "nemotron-h-mixed", "bamba", "falcon-h1")[SEED % 7]
    assert step_cases.snapshot_case(rng, "cpu", name, tmp_path, torch.float32) < 1e-4


MIXED_STEPS = [  # (model, rows, steps)
    ("mistral-window", 8, 6),
    ("qwen3-moe", 8, 3),
    ("mixtral", 8, 3),
    ("glm4-moe", 8, 3),
    ("qwen2-moe-mixed", 3, 3),
    ("smollm3-window", 8, 4),
    ("granite", 8, 4),
    ("gpt-oss-mxfp4", 8, 3),
    ("llama4", 8, 4),
    ("llama4-wide", 3, 4),
    ("exaone4", 8, 3),
    ("glm4", 8, 3),
    ("cohere2", 8, 6),  # a chunk ends a prompt
    ("cohere", 3, 3),
    ("minimax-m2", 8, 3),
    ("ernie4.5-moe", 3, 3),
    ("ernie4.5-moe-late", 8, 3),
    ("granite-swa", 8, 3),
    ("ministral3", 8, 4),
    ("qwen3-vl-moe", 3, 3),
    ("qwen3-next", 8, 3),
    ("qwen3.5", 3, 4),
    ("qwen3.5-nested", 8, 3),  # whose last layer has a state
    ("lfm2", 8, 4),  # its last layer has a convolution
    ("lfm2-biased", 3, 3),
    ("lfm2-moe", 8, 3),
    ("granite4-h", 8, 4),  # whose last layer has a state
    ("granite4-h-moe", 3, 3),
    ("nemotron-h", 8, 4),  # its last layer has no MLP
    ("nemotron-h-moe", 3, 3),
    ("nemotron-h-mixed", 8, 3),
    ("bamba", 8, 4),  # whose last layer has a state
    ("bamba-biased", 3, 3),
    ("falcon-h1", 8, 4),  # its layers have both
    ("falcon-h1-normed", 3, 3),
    ("deepseek-v2-lite", 8, 3),
    ("deepseek-v2", 8, 3),
    ("deepseek-v3", 8, 4),
    ("glm4-moe-lite", 3, 3),
    ("mistral4", 8, 3),
    ("gemma4", 8, 3),
    ("gemma4-moe", 8, 3),
    ("gemma4-moe", 3, 3),
    ("gemma4-nested", 3, 4),
    ("gemma4-e", 8, 4),
    ("gemma4-e-nested", 3, 4),
    ("qwen3-moe-mixed", 3, 4),  # so few that products need no sorting
    ("llama-biased-mqa", step_cases.TOKENS_AT_MOST, 3),  # as many rows as tokens: the last layer keeps all
]


@pytest.mark.parametrize(("name", "rows", "steps"), part_of(MIXED_STEPS, 24))
@redrawn_at_ties
def test_mixed_steps(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, steps: int
) -> None:
    """Decode rows with chunks that end a prompt and chunks that do not; all steps except the second are mixed.

    Later chunks read the last layer's cache of earlier chunks, although that layer continues only with last tokens.
    """
    narrowed = Mock(wraps=last_tokens)
    monkeypatch.setattr(gpu_decoder, "last_tokens", narrowed)
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=steps, rows=rows) < 1e-4
    mixers = 2 if name.startswith("falcon-h1") else 1  # each layer narrows the stream
    assert narrowed.call_count == (mixers * (steps - 1) if rows < step_cases.TOKENS_AT_MOST else 0)


DRAFTED_STEPS = [  # (model, steps): the second step has one request, the last steps of eight have four
    ("llama3", 8), ("gpt-oss", 3), ("deepseek-v3", 3), ("gemma4-moe", 3), ("smollm3-window", 8), ("qwen3-moe", 3),
    ("qwen3-next", 8), ("qwen3.5-nested", 8), ("lfm2", 8), ("granite4-h", 8),
    ("nemotron-h", 8), ("bamba", 8), ("falcon-h1", 8),
]  # fmt: skip


DRAFTED_OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "invariant": {"invariant": True}, "fp8 cache": {"fp8_cache": True}}


@pytest.mark.parametrize(
    ("name", "steps", "options"),
    [
        pytest.param(*of_model, DRAFTED_OPTIONS[how], id=f"{of_model[0]}-{how}")
        for of_model, how in part_of(product(DRAFTED_STEPS, DRAFTED_OPTIONS), 20)
    ],
)
@redrawn_at_ties
def test_steps_with_drafts(rng: np.random.Generator, tmp_path: Path, name: str, steps: int, options: dict[str, Any]) -> None:
    """Rows of one request read the keys of the rows before them."""
    if options.get("fp8_cache") and name == "deepseek-v3":
        options = {}  # latent vectors have no FP8 form
    error = step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=steps, rows=4, drafts=True, **options)
    assert error < (3e-2 if options.get("fp8_cache") else 1e-4)


FEW_DRAFTED: dict[str, Any] = {"draft_requests": 1, "prompts": (3, 12), "steps": 4}  # in the last step, two requests decode


LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"drafts": True, "prompts": (1, 12, 13, 13), "steps": 7},
    "invariant": {"invariant": True, "steps": 3},
    "few": FEW_DRAFTED,
}
DRAFTING_MODELS = ["glm4-moe", "deepseek-v3", "glm4-moe-lite", "qwen3.5"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, LAYER_OPTIONS[how], id=f"{name}-{how}")
        for name, how in part_of(product(DRAFTING_MODELS, LAYER_OPTIONS), 15)
    ],
)
@redrawn_at_ties
def test_steps_with_a_draft_layer(rng: np.random.Generator, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Returned drafts, and the draft layer's keys, equal the CPU's. With drafts: four requests have drafts at the same time,
    across the ends of pages."""
    how: dict[str, Any] = {"steps": 4, "draft_layer": True, **options}
    how["save"] = lambda folder: save_drafting_model(name, folder, int(rng.integers(2**31)))
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, **how) < 1e-4


DRAFTED_HEAD: dict[str, Any] = {"drafts": True, "prompts": (1, 12, 13, 13), "steps": 7}


@pytest.mark.parametrize(
    ("name", "options"),
    part_of(
        [
            pytest.param("llama3", {}, id="plain"),
            pytest.param("qwen3", DRAFTED_HEAD, id="drafts"),
            pytest.param("qwen3", {"invariant": True, "steps": 3}, id="invariant"),
            pytest.param("llama3", FEW_DRAFTED, id="few"),
        ],
        4,
    ),
)
@redrawn_at_ties
def test_steps_with_a_draft_head(rng: np.random.Generator, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """The head's drafts and keys equal the CPU's."""
    seed, layers = int(rng.integers(2**31)), {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    how: dict[str, Any] = {"steps": 4, "table": step_cases.SPLIT_TABLE, **options}
    how["head"] = lambda folder: save_head(folder, folder / "head", seed, num_key_value_heads=2, **layers)
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, **how) < 1e-4


FP8_STEPS = {
    "rows": ({}, "default", False),
    "blocks": ({"blocks": True}, "default", False),
    "static": ({"static": True}, "SPLIT", False),
    "invariant": ({"kept": ("down",)}, "default", True),
    "blocks-split": ({"blocks": True, "kept": ("gate_up",)}, "SPLIT", False),
}


@pytest.mark.parametrize("case", part_of(list(FP8_STEPS), 5))
def test_fp8_steps(rng: np.random.Generator, tmp_path: Path, case: str) -> None:
    """FP8 matrices together with unquantised matrices."""
    quantised, table, invariant = FP8_STEPS[case]
    quantise = partial(fp8_reference.fp8_weights, **quantised)
    how: dict[str, Any] = {"table": TABLES[table], "invariant": invariant, "quantise": quantise, "rows": 3}
    assert of_three(lambda: step_cases.step_case(rng, "cpu", "llama-biased-mqa", tmp_path, torch.float32, steps=3, **how), 1e-3)


def test_fp8_weights_with_unquantised_inputs(rng: np.random.Generator, tmp_path: Path) -> None:
    """The weights are dequantised for the decoder, so steps are as exact as with other weights."""
    section = compressed({"strategy": "channel"}, {}) | {"ignore": ["lm_head"]}
    section["config_groups"]["group_0"]["input_activations"] = None

    def save(folder: Path) -> None:
        save_fp8("cohere2", folder, int(rng.integers(2**31)), "channel")
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": section}))

    assert step_cases.step_case(rng, "cpu", "", tmp_path, torch.float32, steps=2, rows=3, sampled=False, save=save) < 1e-4


FP8_EXPERTS = [("qwen3-moe-mixed", False), ("qwen3-moe-mixed", True), ("gemma4-moe", False)]


@pytest.mark.parametrize(("name", "blocks"), part_of(FP8_EXPERTS))
def test_fp8_experts(rng: np.random.Generator, tmp_path: Path, name: str, blocks: bool) -> None:
    """Only two tokens: of many, some token would go to other experts, with a large error."""
    quantise = partial(fp8_reference.fp8_weights, blocks=blocks)
    how: dict[str, Any] = {"steps": 2, "quantise": quantise, "rows": 3}
    assert of_three(lambda: step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, **how), 1e-3)


@pytest.mark.parametrize(
    ("name", "blocks"), part_of([("qwen3.5", False), ("qwen3.5", True), ("nemotron-h-mixed", False), ("falcon-h1", False)], 4)
)
@redrawn_at_ties
def test_fp8_recurrent_layers(rng: np.random.Generator, tmp_path: Path, name: str, blocks: bool) -> None:
    """Also the two parts of the projection of gated attention; MLPs and experts without gates."""
    how: dict[str, Any] = {"steps": 3, "quantise": partial(fp8_reference.fp8_weights, blocks=blocks), "rows": 3}
    assert of_three(lambda: step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, **how), 1e-3)


def test_fp8_experts_of_two_kinds_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    quantise = partial(fp8_reference.fp8_weights, kept=("down",))
    with pytest.raises(ConfigError, match="all experts"):
        step_cases.step_case(rng, "cpu", "qwen3-moe", tmp_path, torch.float32, steps=1, quantise=quantise)


def test_fp8_steps_by_torch(rng: np.random.Generator, tmp_path: Path) -> None:
    """torch's product with bfloat16 results: the next norm adds the sums, and SwiGLU quantises its result."""
    cublas = step_cases.ChosenTable(lambda n, rows: None if n == model_zoo.VOCAB else LinearConfig("cublas"))
    how: dict[str, Any] = {"table": cublas, "quantise": fp8_reference.fp8_weights, "rows": 3}
    assert of_three(lambda: step_cases.step_case(rng, "cpu", "llama3", tmp_path, torch.bfloat16, steps=3, **how), 0.12)


PACKED_STEPS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "int4": ("llama-biased-mqa", {}, "default", False),
    "zeros": ("qwen3", {"zeros": True, "kept": ("down",)}, "PACKED", False),
    "row": ("llama-biased-mqa", {"group": 0}, "default", True),
    "fp4": ("llama3", {"fp4": True}, "default", False),
    "fp4-split": ("gemma3", {"fp4": True, "kept": ("gate_up",)}, "PACKED", False),
    "ordered": ("qwen3", {"ordered": True}, "default", False),
    "recurrent": ("qwen3.5", {"kept": ("down",)}, "default", False),
    "experts": ("qwen3-moe-mixed", {"zeros": True}, "default", False),
    "experts-fp4": ("glm4-moe", {"fp4": True}, "PACKED", True),
    "experts-ungated": ("nemotron-h-mixed", {"fp4": True}, "default", False),
    "latent": ("deepseek-v3-halves", {"fp4": True, "kept": ("gate_up", "down")}, "default", False),
}


@pytest.mark.parametrize("case", part_of(list(PACKED_STEPS), 7))
@redrawn_at_ties
def test_packed_steps(rng: np.random.Generator, tmp_path: Path, case: str) -> None:
    """4-bit matrices together with unquantised matrices."""
    name, packed, table, invariant = PACKED_STEPS[case]
    how: dict[str, Any] = {"invariant": invariant, "quantise": partial(packed_weights, **packed), "rows": 3}
    how["table"] = step_cases.PACKED_TABLE if table == "PACKED" else LinearTable()
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=3, **how) < 1e-4


FORM_PAIRS = [*((form, "qwen3-biased") for form in (*FORMS, "mxfp4")), ("gptq-order", "qwen3-moe"), ("mxfp4", "qwen3-moe")]


@pytest.mark.parametrize(("form", "zoo"), part_of(FORM_PAIRS, 7))
@redrawn_at_ties
def test_steps_of_packed_checkpoints(rng: np.random.Generator, tmp_path: Path, form: str, zoo: str) -> None:
    """Each stored form, loaded for the decoder."""
    how: dict[str, Any] = {"save": lambda folder: save_packed(rng, folder, form, zoo), "rows": 3, "sampled": False}
    assert step_cases.step_case(rng, "cpu", "", tmp_path, torch.float32, steps=2, **how) < 1e-4


def of_three(error: Callable[[], float], limit: float) -> bool:
    """Whether the error of one of three fresh cases is within a limit.

    Occasionally a number near the middle between two FP8 values rounds the other way, which moves a token's logits by
    a few percent, but not three times in succession.
    """
    return any(error() < limit for _ in range(3))


@redrawn_at_ties
def test_latent_steps(rng: np.random.Generator, tmp_path: Path) -> None:
    """With FP8 matrices, with unquantised matrices, and batch-invariant."""
    how: dict[str, Any] = {"quantise": fp8_reference.fp8_weights, "rows": 3}
    assert of_three(lambda: step_cases.step_case(rng, "cpu", "deepseek-v3-halves", tmp_path, torch.float32, steps=3, **how), 1e-3)
    assert step_cases.step_case(rng, "cpu", "glm4-moe-lite", tmp_path, torch.float32, steps=2, invariant=True) < 1e-4


@redrawn_at_ties
def test_batch_invariant_steps(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct, and the same bits in every batch, if each product of tiles adds in one order, as the matrix unit does."""
    assert step_cases.step_case(rng, "cpu", "qwen3-moe-mixed", tmp_path, torch.float32, steps=2, invariant=True) < 1e-4
    monkeypatch.setattr(np, "matmul", matmul_in_order)
    model = as_stored(describe_model(tmp_path), tmp_path)
    weights = load_weights(model, tmp_path, torch.float32)
    forced = logits.ForcedSteps(rng, model, weights, slots=6, invariant=True)
    assert logits.in_all_batches(forced, rng, model.vocab_size, 2, 5) > 5


def matmul_in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The product a b with sums in one order for all shapes. The order of NumPy's product depends on a row's place, but its sums
    along a first axis are in order."""
    first = a.ndim - 2  # of the matrices; those before it are of a batch
    products = np.moveaxis(a, -1, 0)[..., None] * np.moveaxis(b, first, 0)[..., None, :]
    return np.add.reduce(products, axis=0, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "table"),
    part_of(
        [
            ("gemma2", "CUBLAS"),
            ("gemma3", "SPLIT"),
            ("olmo3", "default"),
            ("gemma4-moe", "SPLIT"),
            ("gemma4", "CUBLAS"),
            ("gemma4-e", "SPLIT"),
        ],
        6,
    ),
)
@redrawn_at_ties
def test_norms_behind(rng: np.random.Generator, tmp_path: Path, name: str, table: str) -> None:
    """Attention and MLP end in a norm whose result is added to the residual stream; its input is whole, or parts of split
    sums."""
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=3, table=TABLES[table]) < 1e-4


@pytest.mark.parametrize(
    ("name", "table"),
    part_of([("qwen3-next", "CUBLAS"), ("qwen3.5", "SPLIT"), ("falcon-h1", "CUBLAS"), ("falcon-h1", "SPLIT")], 4),
)
@redrawn_at_ties
def test_recurrent_layers(rng: np.random.Generator, tmp_path: Path, name: str, table: str) -> None:
    """Two products read the normed input of a gated delta net, and of attention parallel to a state space. The norm adds up split
    sums.
    """
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=3, table=TABLES[table]) < 1e-4


@pytest.mark.parametrize("name", part_of(["gemma4-moe", "gemma4-e", "llama4", "gemma2-uncapped"], 4))
def test_window_rings(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    """The same bits as with all tokens kept, also in the last layer, which continues only with last tokens."""
    step_cases.ring_case(rng, "cpu", name, tmp_path, torch.float32, step_cases.few_ring_steps, tokens=32)


def test_parts_that_no_norm_would_add_are_not_left(rng: np.random.Generator, tmp_path: Path) -> None:
    """After attention of a layer with experts: the kernel for many rows can't add up parts."""
    states, seed = [], int(rng.integers(2**31))
    for table in (step_cases.TMA_TABLE, step_cases.CUBLAS_TABLE):
        same = np.random.default_rng(seed)
        on = step_cases.on_device(same, "cpu", "qwen3-moe", tmp_path, torch.bfloat16, table=table)
        decoder, generator = on.step.decoder, torch.Generator().manual_seed(seed)
        hidden = decoder.buffers.hidden[:8].normal_(generator=generator)
        decoder.stream = ResidualStream(hidden, decoder.batch.counts)
        attended = decoder.buffers.attended[:8].normal_(generator=generator)
        layer = decoder.weights.layers[0]
        decoder._add_linear(attended, layer.o, layer.o_bias, None, norm_follows=False)
        states.append(hidden.clone())
    assert torch.equal(*states)


@pytest.mark.parametrize("blocks", [None, False, True], ids=["bfloat16", "fp8", "fp8-blocks"])
def test_a_product_that_no_norm_adds_leaves_no_parts(rng: np.random.Generator, tmp_path: Path, blocks: bool | None) -> None:
    """A table's entry is for a shape: projections of queries or gates can share an output projection's entry with split sums."""
    found, seed = [], int(rng.integers(2**31))
    quantise = None if blocks is None else partial(fp8_reference.fp8_weights, blocks=blocks)
    for parts in (1, 2):
        same, table = np.random.default_rng(seed), step_cases.ChosenTable(lambda n, rows, parts=parts: step_cases.WIDE[parts])
        on = step_cases.on_device(same, "cpu", "llama3", tmp_path, torch.bfloat16, table=table, quantise=quantise)
        decoder, generator = on.step.decoder, torch.Generator().manual_seed(seed)
        x = decoder.buffers.hidden[:8].normal_(generator=generator)
        decoder.stream = ResidualStream(x, decoder.batch.counts)
        decoder.view.counts.fill_(8)
        qkv, gate_up = decoder.buffers.qkv[:8], decoder.weights.layers[0].gate_up
        inner = torch.zeros(8, decoder.model.layers[0].mlp.size, dtype=x.dtype)
        decoder._linear(x, decoder.weights.layers[0].qkv, qkv)
        decoder._linear(x, gate_up, inner, swiglu=True)
        found.append((qkv.clone(), inner))
    for one, two in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


def test_scratch_of_linear_layers_holds_the_largest_step(rng: np.random.Generator, tmp_path: Path) -> None:
    table = step_cases.CUBLAS_TABLE
    on = step_cases.on_device(rng, "cpu", "llama3", tmp_path, torch.float32, table=table)
    on.step.launch(max(on.step.shapes, key=lambda shape: shape.tokens))  # an empty batch; too little is a ValueError


def test_the_layers_end_before_the_last_norm(rng: np.random.Generator, tmp_path: Path) -> None:
    """The part that a capture assigns to the layers computes the residual stream; the part that it assigns to the output does
    not."""
    on = step_cases.on_device(rng, "cpu", "llama3", tmp_path, torch.float32)
    shape = on.give(on.batches.batch([(on.batches.add(list(range(9))), 9)]))
    decoder = on.step.decoder
    hidden, last, logits = decoder.buffers.hidden, decoder.buffers.last, decoder.buffers.logits
    for buffer in (last, logits):
        buffer.fill_(-7.0)
    before = hidden.clone()
    decoder.layers(shape)
    assert not torch.equal(hidden, before)
    assert (last == -7.0).all()
    assert (logits == -7.0).all()
    after = hidden.clone()
    decoder.output(shape)
    assert torch.equal(hidden, after)
    assert not (logits[0] == -7.0).any()


@pytest.mark.parametrize(
    ("name", "table", "groups"),
    part_of(
        [
            ("llama3", "SPLIT", 5),
            ("llama3", "CUBLAS", 3),
            ("qwen3-moe-mixed", "SPLIT", 5),
            ("gemma2", "SPLIT", 2),
            ("gemma4-e", "SPLIT", 4),
            ("nemotron-h", "SPLIT", 3),
            ("cohere2", "SPLIT", 4),
            ("cohere2", "CUBLAS", 5),
        ],
        8,
    ),
)
def test_a_step_in_groups_of_layers_gives_what_a_whole_one_gives(
    rng: np.random.Generator, tmp_path: Path, name: str, table: str, groups: int
) -> None:
    """Other steps run between two groups, or leave their data in the shared buffers. Sums end at a group's border, so the last
    bits may differ.

    Supports claim decisions/groups.
    """
    on = step_cases.on_device(rng, "cpu", name, tmp_path, torch.float32, table=TABLES[table])
    decoder, step = on.step.decoder, on.step
    long, short = (on.batches.add(rng.integers(0, 50, n).tolist()) for n in (20, 7))
    batch, other = (on.batches.batch([(sequence, count)]) for sequence, count in ((long, 20), (short, 7)))
    whole = on.give(batch)
    step.launch(whole)
    logits, tokens = decoder.buffers.logits[0].clone(), on.batch.sampled[0].item()
    keys = [layer.clone() for layer in on.cache.keys]
    for layer in (*on.cache.keys, *on.cache.values):
        layer.zero_()
    cut = replace(whole, groups=groups)
    decoder.buffers.cut_hidden = torch.zeros_like(decoder.buffers.hidden)
    decoder.buffers.cut_layer_inputs = torch.zeros_like(decoder.buffers.layer_inputs)
    decoder.buffers.cut_normed = torch.zeros_like(decoder.buffers.normed)
    for group in range(groups):
        on.give(batch)
        decoder.group(cut, group)
        if group == 0 and name == "llama3":
            step.launch(on.give(other))
        elif group + 1 < groups:
            for field, buffer in vars(decoder.buffers).items():
                if not field.startswith("cut_") and buffer.is_floating_point():
                    buffer.fill_(-70.0)
    if (name, table) == ("llama3", "SPLIT"):
        assert decoder.stream.partials is not None, "the last group leaves its sums to the last norm, as a whole step does"
    step._output(cut)
    torch.testing.assert_close(decoder.buffers.logits[0], logits, atol=1e-4, rtol=1e-4)
    assert on.batch.sampled[0].item() == tokens
    pages = long.pages
    for layer, expected in zip(on.cache.keys, keys, strict=True):
        if len(layer):  # a recurrent layer has no pages
            torch.testing.assert_close(layer[pages], expected[pages], atol=1e-4, rtol=1e-4)
