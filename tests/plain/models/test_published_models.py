"""Published models: what of them is supported, with which size, and the words of the refusals."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from blinkpy.config import ConfigError
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.weights.weight_parts import weight_elements

ROOT = Path(__file__).parents[3]
MODELS: list[Any] = list(runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.hub_id)
def test_supported_or_refused_with_the_right_words(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    if model.refusal:
        with pytest.raises(ConfigError, match=re.escape(model.refusal)):
            describe_config(model.config)
    else:
        assert weight_elements(describe_config(model.config)) == model.parameters
        assert caplog.messages == []


def test_the_page_has_the_sizes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page, written = ROOT / "docs" / "models.md", runpy.run_path(str(ROOT / "tools" / "write_model_sizes.py"))["written"]
    assert page.read_text() == written(page.read_text()), "sizes changed: run `make docs`"
