"""The memory plan of a GPU covers the decoder's allocations: measured with meta tensors, which have sizes but no memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.aot_cases import MAX_MODEL_LEN
from benchmarks.common.aot_models import STEPS, WITH_HEADS, Form, MetaStep, forms_of, published, step_of
from blinkpy.config import Config
from blinkpy.kernels.all_reduce import connect_peers
from blinkpy.models.description.split import Share
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_memory_plan import activation_bytes, peer_bytes
from blinkpy.serving.model_facts import fit

SHAPE = replace(max(STEPS, key=lambda shape: shape.tokens), tokens=8192, rows=256, whole=True)
MODELS = 8  # in each run
MARGIN = 1 << 20  # bytes
GIVEN = ("weights", "cache", "batch", "requests", "view", "tables", "table")  # inputs of a decoder, not its own buffers


def tensors_in(item: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object refers to, without those of GIVEN."""
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict):
        for one in item.values():
            yield from tensors_in(one, seen)
    elif isinstance(item, (list, tuple)):
        for one in item:
            yield from tensors_in(one, seen)
    elif type(item).__module__.startswith("blinkpy.") and hasattr(item, "__dict__"):
        for name, one in vars(item).items():
            if name not in GIVEN:
                yield from tensors_in(one, seen)


def allocated(form: Form) -> int:
    """Bytes of the buffers of a form's decoder for the largest step."""
    decoder = step_of(MetaStep(form, SHAPE)).decoder
    seen = {id(one) for name in GIVEN for one in [getattr(decoder, name, None)]}
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors_in(decoder, seen)}
    return sum(storages.values())


def planned(form: Form) -> int:
    """Bytes for the buffers of a form's decoder, with those of its draft head."""
    both = [form.model] if form.model.draft_head is None else [form.model, form.model.draft_head]
    return sum(activation_bytes(one, SHAPE.tokens, SHAPE.rows, MAX_MODEL_LEN, form.dtype.itemsize) for one in both)


def served(model: Any) -> list[Form]:
    return [form for form in forms_of(model.hub_id, model.config) if isinstance(form, Form)]


def test_buffers_are_within_the_plan(rng: np.random.Generator) -> None:
    """For all forms of drawn published models; and most of a plan is used."""
    used = list[float]()
    for index in rng.choice(len(published()), MODELS, replace=False).tolist():
        for form in served(published()[index]):
            found, most = allocated(form), planned(form)
            assert found <= most, f"{form.hub_id} {form.name}: {found} bytes of {most}"
            used.append(found / most)
    assert np.median(used) > 0.3


def test_a_draft_layer_adds_what_the_plan_adds() -> None:
    """For the first model of each class with a draft layer. A bound with a margin would hide missing buffers."""
    classes = set[str]()
    for model in published():
        if not model.config.get("num_nextn_predict_layers") or set(model.config["architectures"]) <= classes:
            continue
        classes |= set(model.config["architectures"])
        forms = {form.name: form for form in served(model)}
        if "mtp" in forms:
            more = allocated(forms["mtp"]) - allocated(forms["bfloat16"])
            most = planned(forms["mtp"]) - planned(forms["bfloat16"])
            assert 0 < more <= most + MARGIN <= 2 * more, model.hub_id
    assert len(classes) > 1


def test_a_draft_head_adds_what_the_plan_adds() -> None:
    for model in published():
        if model.hub_id in WITH_HEADS:
            forms = {form.name: form for form in served(model)}
            more, head = allocated(forms["eagle3"]) - allocated(forms["bfloat16"]), forms["eagle3"].model.draft_head
            assert head is not None
            most = activation_bytes(head, SHAPE.tokens, SHAPE.rows, MAX_MODEL_LEN, torch.bfloat16.itemsize)
            assert most / 3 < more <= most, model.hub_id


def test_chosen_slots_fit_like_slots_that_were_asked_for(rng: np.random.Generator) -> None:
    """The report of check-model for GPUs of any size and number: its own choice of slots leads to the plan of that choice."""
    fitting = 0
    for index in rng.choice(len(published()), 5 * MODELS, replace=False).tolist():
        model = describe_config(published()[index].config, "auto")
        total, ranks = int(rng.integers(16 << 30, 150 << 30)), int(rng.choice([1, 2, 4]))
        config = Config().with_options({"tensor_parallel_size": ranks})
        found = fit(model, config, "any", total)
        if not found.problem:
            fitting += ranks > 1
            assert fit(model, config.with_options({"slots": found.slots}), "any", total) == found, published()[index].hub_id
    assert fitting


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_memory_for_sums_is_planned(ranks: int, rng: np.random.Generator) -> None:
    tokens, hidden, rows, vocab = (int(rng.integers(*some)) for some in ((1, 9000), (64, 9000), (1, 300), (4000, 200_000)))
    head = [Share(rank, ranks).head(vocab) for rank in range(ranks)]
    peers = connect_peers([torch.device("meta")] * ranks, torch.bfloat16, tokens, hidden, rows, head)
    for rank in peers:
        own = sum(tensor.nbytes for tensor in rank.memory) // ranks  # the logits of `part` belong to the decoder
        model: Any = type("Model", (), {"hidden_size": hidden, "vocab_size": vocab})
        most = peer_bytes(model, tokens, rows, ranks, torch.bfloat16.itemsize)
        assert own <= most <= own + 2 * MARGIN, (own, most)
