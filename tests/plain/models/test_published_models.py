"""Published models: their support, their sizes, and the texts of the refusals."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkpy.config import ConfigError
from blinkpy.models.families.family import describe_config
from blinkpy.models.weights.parts.weight_sizes import weight_elements

ROOT = Path(__file__).parents[3]
PUBLISHED = runpy.run_path(str(ROOT / "tools" / "published_models.py"))
MODELS: list[Any] = [*PUBLISHED["MODELS"], *PUBLISHED["ON_CPU"]]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.hub_id)
def test_supported_or_refused_with_the_right_words(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    if model.refusal:
        with pytest.raises(ConfigError, match=re.escape(model.refusal)):
            describe_config(model.config)
    else:
        assert weight_elements(describe_config(model.config)) == model.parameters
        assert caplog.messages == []


ODD = [None, True, 0, -1, 1, 0.5, 1 << 70, 10**400, 1e300, float("nan"), "", "yarn", [], ["x"], [None], {}, {"rope_type": "yarn"}]
ROPE = [
    "type",
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "mscale",
    "beta_slow",
    "low_freq_factor",
    "long_factor",
]
KINDS = ["linear", "dynamic", "yarn", "llama3", "longrope"]


def test_odd_values_are_refused_in_a_line_or_make_sense(rng: np.random.Generator) -> None:
    """Of any key, of the rotary embedding's scaling, and of its contents: no other error."""
    supported, refusals = [model.config for model in MODELS if not model.refusal], list[str]()
    for _ in range(500):
        config = copy.deepcopy(supported[rng.integers(len(supported))])
        section = config.get("text_config", config)
        if rng.random() < 0.4:
            scaling = {"rope_type": str(rng.choice(KINDS)), "factor": 4.0}
            section = section[str(rng.choice(["rope_scaling", "rope_parameters"]))] = scaling
        section[str(rng.choice([*section, *ROPE, "quantization_config"]))] = ODD[rng.integers(len(ODD))]
        try:
            describe_config(config)
        except ConfigError as error:
            refusals.append(str(error))
    assert 100 < len(refusals) < 450
    assert not [words for words in refusals if "\n" in words or len(words) > 900]


def test_the_page_has_the_sizes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page, written = ROOT / "docs" / "models.md", runpy.run_path(str(ROOT / "tools" / "write_model_sizes.py"))["written"]
    assert page.read_text() == written(page.read_text()), "sizes changed: run `make docs`"
