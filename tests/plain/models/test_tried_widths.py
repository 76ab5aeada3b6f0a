"""check-model's report of runs on GPUs: by widths, from a packaged copy of the committed results."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from blinkpy import cli
from blinkpy.config import ConfigError
from blinkpy.models.families.family import describe_config
from blinkpy.serving.model_facts import FILE, Tried, tried, widths_of

ROOT = Path(__file__).parents[3]
GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return runpy.run_path(str(ROOT / "tools" / "write_tried_widths.py"))


def case(model: str, form: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "form": form, "kv_cache": "auto", "agrees": True, "largest_error": 0.02, **more}


def results(path: Path, *cases: dict[str, Any]) -> Path:
    environment = {"gpu": GPU, "date": "2026-11-28T06:00:00", "commit": {"hash": "1234567"}}
    path.write_text(json.dumps({"environment": environment, "cases": list(cases)}))
    return path


def test_the_packaged_copy_is_made_from_the_committed_results(tool: dict[str, Any]) -> None:
    assert FILE.read_text() == tool["written"](), "results changed: run `make docs`"


def test_models_of_equal_widths_share_a_run(tmp_path: Path, tool: dict[str, Any]) -> None:
    configs = {model.hub_id: model.config for model in tool["MODELS"] if not model.refusal}
    llama, distilled, wider, other_class = (
        describe_config(configs[name])
        for name in (
            "meta-llama/Llama-3.1-8B-Instruct",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "meta-llama/Llama-3.2-3B-Instruct",
            "mistralai/Mistral-7B-Instruct-v0.3",
        )
    )
    failed = case("Qwen/Qwen3-30B-A3B", "fp8", kv_cache="fp8_e4m3", agrees=False, largest_error=None, gpu="NVIDIA H200")
    same = (case("meta-llama/Llama-3.1-8B-Instruct", "bfloat16"), case("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "bfloat16"))
    made = tmp_path / "made.json"
    made.write_text(tool["written"](results(tmp_path / "results.json", *same, failed)))
    [run] = tried(llama, made)
    assert run == Tried("bfloat16", "auto", GPU, True, 0.02, "2026-11-28T06:00:00", "1234567")
    assert run.text == f"bfloat16 agrees, largest error 0.02 ({GPU}, 2026-11-28)"
    assert tried(distilled, made) == [run]
    assert tried(wider, made) == tried(other_class, made) == []
    [run] = tried(describe_config(configs["Qwen/Qwen3-30B-A3B"]), made)
    assert run.text == "fp8 with a cache of fp8_e4m3 differs (NVIDIA H200, 2026-11-28)"
    with pytest.raises(KeyError):
        tool["written"](results(tmp_path / "results.json", case("nobody/nothing", "bfloat16")))


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": {"WIDTHS": [{}]}}', '{"runs": []}'])
def test_a_damaged_copy_is_refused(tmp_path: Path, tool: dict[str, Any], text: str) -> None:
    model = describe_config(tool["MODELS"][0].config)
    (tmp_path / "made.json").write_text(text.replace("WIDTHS", widths_of(model)))
    with pytest.raises(ConfigError, match="is not a list of runs on GPUs"):
        tried(model, tmp_path / "made.json")


def test_check_model_says_what_was_tried(
    tmp_path: Path, tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published = next(model for model in tool["MODELS"] if model.hub_id == "Qwen/Qwen3-32B")
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    cli.main(["check-model", str(tmp_path)])
    empty = capsys.readouterr().out
    made = tmp_path / "made.json"
    made.write_text(tool["written"](results(tmp_path / "results.json", case("Qwen/Qwen3-32B", "fp8", kv_cache="fp8_e4m3"))))
    monkeypatch.setattr("blinkpy.serving.model_facts.tried", lambda model: tried(model, made))
    cli.main(["check-model", str(tmp_path)])
    page = capsys.readouterr().out
    assert f"  fp8 with a cache of fp8_e4m3 agrees, largest error 0.02 ({GPU}, 2026-11-28)" in page
    assert page != empty
    cli.main(["check-model", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["tried"][0]["form"] == "fp8"


def test_a_head_size_without_a_kernel_fits_no_gpu(
    tmp_path: Path, tool: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    published = next(model for model in tool["MODELS"] if model.hub_id == "Qwen/Qwen3-8B")
    (tmp_path / "config.json").write_text(json.dumps(published.config | {"head_dim": 520}))
    cli.main(["check-model", str(tmp_path)])
    assert "model.layers.0.self_attn: head size 520, and the kernels take sizes from 16 to 512" in capsys.readouterr().out
