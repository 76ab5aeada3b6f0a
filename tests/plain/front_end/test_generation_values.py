"""Each key of generation_config.json: it sets a default of requests, or a warning names it, or it has no effect in transformers.

The keys come from transformers' GenerationConfig, and its generate() with a small model is the judge of effects.
"""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.front_end.tiny_tokenizer import write_model
from support.part_of_cases import part_of
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import GenerationConfig as Known

from blinkpy.config import ConfigError
from blinkpy.dpu.http.fields.shared_fields import token_limit
from blinkpy.dpu.text.generation_config import APPLIED, IGNORED, WITHOUT_EFFECT
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.cpu.cpu_sampler import read_parameters, sample_rows
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import SQ_ENTRY

VOCABULARY, LENGTH, MORE = 40, 5, 6
ANY = [True, 0, 1, 2, 0.3, 1.7, [3], [], "x"]
VALUES: dict[str, list[Any]] = {
    "temperature": [0.01, 0.5, 2.0, 0, -1, 1e9],
    "top_p": [0.2, 0.9, 0, 1.5],
    "top_k": [3, 50, 2.5, -1, -2],
    "min_p": [0.05, 0.5, 2],
    "repetition_penalty": [0.5, 1.3, 0, -1],
    "max_new_tokens": [3, 0, -1, 2.0],
    "eos_token_id": [list(range(20)), 7, [7, 8], -1, 1 << 40],
    "suppress_tokens": [list(range(20))],
    "begin_suppress_tokens": [list(range(20))],
    "bad_words_ids": [[[token] for token in range(20)]],
    "sequence_bias": [[[[token], -50.0] for token in range(20)]],
    "forced_eos_token_id": [9],
    "forced_bos_token_id": [9],
    "exponential_decay_length_penalty": [[2, 1.5]],
    "watermarking_config": [{"bias": 30.0, "greenlist_ratio": 0.25}],
    "length_penalty": [-3.0],
    "cache_implementation": ["static", "dynamic"],
    "num_assistant_tokens_schedule": ["constant"],
}
# Drafts leave the distribution unchanged, but take other random numbers: their greedy tokens are compared.
DRAFTS = {"assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"}
UNKNOWN = ["presence_penalty", "chat_format", "user_token_id"]


def known_keys() -> list[str]:
    """All keys of transformers' class, also keys without a default."""
    return sorted({key for key in vars(Known()) if not key.startswith("_")} | {"_from_model_config", "_commit_hash"})


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    }
    made = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)).eval()
    made.lm_head.weight.data *= 8
    return made


def generated(model: Any, values: dict[str, Any], prompt: torch.Tensor) -> list[list[int]] | None:
    """Tokens of transformers, greedy and sampled; None: it refuses the values."""
    outputs = []
    for samples in (False, True):
        try:
            config = GenerationConfig(**{"max_new_tokens": MORE, "do_sample": samples, **values})
            torch.manual_seed(1)
            found = model.generate(prompt, generation_config=config, pad_token_id=0)
        except Exception:  # transformers has no single error for a config that it does not take
            return None
        found = found if isinstance(found, torch.Tensor) else found.sequences
        outputs.append(found.flatten().tolist())
    return outputs


def test_each_key_has_one_rule() -> None:
    assert not APPLIED & IGNORED.keys() and not APPLIED & WITHOUT_EFFECT and not IGNORED.keys() & WITHOUT_EFFECT
    missing = set(known_keys()) - APPLIED - IGNORED.keys() - WITHOUT_EFFECT
    assert not missing, "generation_config.py has no rule for these keys of transformers"


@pytest.mark.parametrize("key", part_of([*known_keys(), *UNKNOWN], 16))
def test_a_value_has_its_effect_or_a_warning(
    key: str, model: Any, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = torch.tensor(rng.integers(VOCABULARY, size=(1, LENGTH)))
    plain, refusals = generated(model, {}, prompt), list[tuple[Any, str]]()
    for value in [*ANY, *VALUES.get(key, [])]:
        folder = write_model(tmp_path / "model")
        (folder / "generation_config.json").write_text(json.dumps({key: value}))
        expected = None if key in APPLIED else generated(model, {key: value}, prompt)
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                tokenizer = Tokenizer(folder)
                tokenizer.request_defaults()
        except ConfigError as error:
            refusals.append((value, str(error)))
            continue
        if key in APPLIED:
            check_applied(key, value, tokenizer)
        elif expected is not None and plain is not None and _differs(key, expected, plain):
            assert key in caplog.text, f"{key}: {value} has an effect in transformers: {expected}, not {plain}"
        assert not (key in UNKNOWN and value != [] and key not in caplog.text)
    assert not refusals or key in APPLIED
    assert not [(value, text) for value, text in refusals if key not in text]


def _differs(key: str, expected: list[list[int]], plain: list[list[int]]) -> bool:
    return expected[0] != plain[0] or (key not in DRAFTS and expected != plain)


def check_applied(key: str, value: Any, tokenizer: Tokenizer) -> None:
    """The default is that of the file, as GenerationConfig reads it."""
    defaults, read = tokenizer.request_defaults(), getattr(GenerationConfig(**{key: value}), key)
    if key == "eos_token_id":
        assert set(tokenizer.eos_ids) == {1, *(read if isinstance(read, list) else [read])} or len(tokenizer.eos_ids) == 8
    elif key == "max_new_tokens":
        assert tokenizer.longest_output == read
    elif key == "do_sample":
        assert defaults == RequestParameters(temperature=1.0 if read else 0.0)
    else:
        assert getattr(defaults, key) == max(read, 0) and defaults == RequestParameters(**{key: max(read, 0)})


def test_the_defaults_give_transformers_distribution(tmp_path: Path, rng: np.random.Generator, model: Any) -> None:
    """Sampled tokens of the CPU are among transformers' candidates, and the likely ones occur."""
    for _ in range(8):
        chosen = {
            "temperature": float(rng.uniform(0.3, 2)),
            "top_p": float(rng.uniform(0.3, 0.95)),
            "top_k": int(rng.integers(2, 20)),
        }
        chosen |= {"min_p": float(rng.uniform(0.01, 0.2))}
        values = {key: value for key, value in chosen.items() if rng.integers(2)}
        folder = write_model(tmp_path / "model")
        (folder / "generation_config.json").write_text(json.dumps({**values, "do_sample": True}))
        defaults = Tokenizer(folder).request_defaults()
        logits = rng.normal(0, 2, VOCABULARY).astype(np.float32)
        config = GenerationConfig(**values, do_sample=True)
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
        warpers = model._get_logits_processor(generation_config=config, input_ids_seq_length=1)
        probabilities = torch.softmax(warpers(torch.tensor([[0]]), torch.tensor(logits)[None]), -1)[0].numpy()
        draws = 400
        rows = np.repeat(logits[None], draws, 0)
        counts = np.bincount(own_draws(rows, defaults, rng), minlength=VOCABULARY)
        assert not counts[probabilities < 1e-7].any(), f"{values}: a token that transformers excludes"
        assert counts[probabilities > 0.05].all(), f"{values}: a likely token is never drawn"


def own_draws(rows: np.ndarray, defaults: RequestParameters, rng: np.random.Generator) -> np.ndarray:
    entries = np.zeros(len(rows), SQ_ENTRY)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        entries[name] = getattr(defaults, name)
    entries["seed"] = rng.integers(1 << 40, size=len(rows))
    return sample_rows(rows, read_parameters(entries), np.arange(len(rows), dtype=np.int32))


def test_no_key_is_lost_and_neutral_values_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path / "model")
    content = {
        "num_beams": 4,
        "max_length": 20,
        "presence_penalty": 1.5,
        "typical_p": 1.0,
        "use_cache": True,
        "bad_words_ids": [],
    }
    (folder / "generation_config.json").write_text(json.dumps(content))
    Tokenizer(folder).request_defaults()
    ignored = "ignoring keys that have no effect on requests: max_length, num_beams, presence_penalty"
    assert caplog.messages == [f"{folder}/generation_config.json: {ignored}"]


def test_max_new_tokens_limits_requests_that_set_no_limit() -> None:
    """The context bounds the default, and `min_tokens` raises it."""

    def limit(given: int | None, minimum: int = 0, prompt: int = 10, default: int | None = 20) -> int:
        request: Any = SimpleNamespace(max_tokens=given, messages=None, parameters=RequestParameters(min_tokens=minimum))
        return token_limit(request, prompt, 100, default)

    assert [limit(None), limit(50), limit(3)] == [20, 50, 3]
    assert [limit(None, default=None), limit(None, default=500), limit(None, prompt=95)] == [90, 90, 5]
    assert limit(None, minimum=30) == 30
