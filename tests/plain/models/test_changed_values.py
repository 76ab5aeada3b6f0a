"""Each value of each family's config.json, changed: the model is refused with the names of keys, or it has transformers' logits.

The list makes itself from the config.json that transformers writes. Without an effect in transformers, a value need not be taken.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.expected_logits import expected_logits, experts_of_a_token
from support.models.model_zoo import VISION_SECTIONS, VOCAB, ZOO, make_model, save_model
from support.models.paged_batch import PagedBatches
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.families.family import describe_model
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import load_weights

PAGE, PAGES, LENGTH, FEWEST = 8, 16, 50, 8
TOLERANCE = 2e-3  # of logits relative to their spread, if that is above 1
# Values with an effect on other things than logits, or on the sizes of the tests' inputs.
LEFT_OUT = {"vocab_size", "model_type", "architectures", "dtype", "transformers_version", "use_cache", "id2label", "label2id"}
LEFT_OUT |= {"output_attentions", "output_hidden_states", "return_dict", "problem_type", "is_encoder_decoder", "name_or_path"}
ACTIVATIONS = ["silu", "gelu", "relu", "gelu_pytorch_tanh"]
MODELS = [name for name, (kind, _) in ZOO.items() if kind not in VISION_SECTIONS and not name.endswith("mxfp4")]


def others(key: str, value: Any) -> list[Any]:
    """Other values of a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, max(1, value // 2), value + 1, 0]
    if isinstance(value, float):
        return [1.7 * value, 0.0] if value else [0.3]
    if isinstance(value, list):
        return [value[::-1]] if value else [[0], [1]]
    if value in ACTIVATIONS:
        return [name for name in ACTIVATIONS if name != value]
    if key == "rope_type":
        return ["linear", "dynamic", "default"]
    return [7, 16, True, 0.5] if value is None else []


def changes(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """New values of one key, or of one key in a section at any depth, which is given whole."""
    for key, value in values.items():
        if key in LEFT_OUT or key.endswith("token_id"):
            continue
        if isinstance(value, dict):
            yield from ({key: value | change} for change in changes(value))
        else:
            yield from ({key: other} for other in others(key, value) if other != value)


def keys_of(values: dict[str, Any]) -> set[str]:
    return {key for name, value in values.items() for key in (name, *(keys_of(value) if isinstance(value, dict) else ()))}


def own_logits(folder: Path, tokens: list[int], rng: np.random.Generator) -> np.ndarray:
    """Of all tokens, as one prompt. Raises ConfigError."""
    model = as_stored(describe_model(folder), folder)
    cache = PagedCache(model, PAGES, PAGE, torch.float32, slots=1)
    context = len(tokens)  # for longrope, where transformers follows the length of each sequence
    decoder = TorchDecoder(model, load_weights(model, folder, torch.float32), cache, context, LENGTH)
    sizes = {"num_pages": PAGES, "slots": 1, "max_model_len": context, "max_tokens": LENGTH, "max_rows": 1}
    batches = PagedBatches(rng, page_size=PAGE, **sizes)
    batch = batches.batch([(batches.add(tokens), len(tokens))])
    return np.asarray(decoder.logits(decoder.forward(batch, batches.requests.page_table)))


@pytest.mark.parametrize("name", part_of(MODELS, 20))
def test_a_changed_value_is_refused_or_has_its_effect(name: str, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    tokens, outcomes, wrong = rng.integers(0, VOCAB, LENGTH).tolist(), Counter[str](), list[str]()
    for number, change in enumerate(changes(make_model(name, seed).config.to_dict())):
        folder = tmp_path / str(number)
        try:
            model = save_model(name, folder, seed, **copy.deepcopy(change))
            expected, end = expected_logits(model, tokens, experts_of_a_token(model.config))
            if not np.isfinite(expected).all():
                raise ValueError
        except Exception:  # transformers has no single error for a config that it does not take
            outcomes["transformers refuses"] += 1
            continue
        try:
            error = np.abs(own_logits(folder, tokens, rng) - expected)[:end].max(initial=0.0) / max(1.0, expected.std())
        except ConfigError as refusal:
            outcomes["refused"] += 1
            named = keys_of(model.config.to_dict()) & set(re.findall(r"\w+", str(refusal)))
            wrong += [] if named else [f"{change}: the refusal names no key: {refusal}"]
            continue
        outcomes["as transformers" if end >= FEWEST else "too many ties"] += 1
        wrong += [f"{change}: logits are off by {error}"] if error > TOLERANCE else []
    assert not wrong, "\n".join(wrong)
    assert outcomes["as transformers"] > 20, outcomes
    assert outcomes["refused"], outcomes
