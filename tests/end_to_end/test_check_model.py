"""blinkpy check-model: the page and its JSON, for folders that an engine can serve, and folders that it can't."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from support.front_end.tiny_tokenizer import write_model
from support.models.eagle_heads import HEAD, save_head
from support.models.model_zoo import save_model

from blinkpy import cli
from blinkpy.config import Config, step_sizes
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.gpu.gpu_memory_plan import plan_memory
from blinkpy.serving.model_facts import fit

NEEDED = "model.layers.1.mlp.experts.5.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_model("glm4-moe", folder, 1)
    config = json.loads((folder / "config.json").read_text())
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def look(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and facts; asserts that the page has the same problems."""
    code = cli.main(["check-model", *arguments])
    page = capsys.readouterr().out
    assert cli.main(["check-model", *arguments, "--json"]) == code
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] == (code == 0) == bool(facts["command"])
    assert all(problem in page for problem in facts["problems"]) and facts["command"] in page
    assert len(page.splitlines()) < 40
    return code, facts


def change(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_a_supported_model_is_described(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = look(capsys, str(model))
    stored = safetensors.torch.load_file(model / "model.safetensors")
    assert code == 0 and facts["command"] == f"blinkpy serve {model}"
    assert facts["model_class"] == "Glm4MoeForCausalLM"
    assert sum(facts["parameters"].values()) == sum(tensor.numel() for tensor in stored.values())
    experts = sum(tensor.numel() for name, tensor in stored.items() if ".experts." in name)
    assert facts["parameters"]["experts"] == experts
    assert facts["parameters"]["shared experts"] == sum(t.numel() for name, t in stored.items() if "shared_experts" in name)
    assert facts["active_parameters"] == sum(facts["parameters"].values()) - experts * 8 // 12  # 4 of 12
    assert facts["cache_bytes_per_token"] == 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, float32
    assert (facts["tokenizer"]["kind"], facts["tokenizer"]["adds it"], len(facts["tokenizer"]["ends a text"])) == ("BPE", True, 1)
    assert facts["chat"] == {"template": True, "tool_call_parser": "none", "reasoning_parser": "none"}
    assert [one["context"] for one in facts["gpus"]] == [256, 256]


def test_packed_weights_count_by_their_bits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("gpt-oss-mxfp4", model, 1)
    config = json.loads((model / "config.json").read_text())
    code, facts = look(capsys, str(model), "--dtype", "bfloat16")
    stored = safetensors.torch.load_file(model / "model.safetensors")
    packed = [tensor for tensor in stored.values() if tensor.dtype == torch.uint8]
    biases = [tensor for name, tensor in stored.items() if ".experts." in name and name.endswith("_bias")]
    experts = 3 * config["num_local_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]
    assert code == 0 and facts["quantization"] == "mxfp4" and len(packed) == 3 * 4 and len(biases) == 3 * 2
    assert facts["parameters"]["experts"] == experts + sum(tensor.numel() for tensor in biases)
    assert facts["weight_bytes"]["experts"] == sum(tensor.nbytes for tensor in packed) + 2 * sum(t.numel() for t in biases)
    rest = [tensor for tensor in stored.values() if tensor.dtype != torch.uint8]
    assert sum(facts["parameters"].values()) == experts + sum(tensor.numel() for tensor in rest)
    assert "dense MLPs" not in facts["parameters"]


def test_options_reach_the_arithmetic_and_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = look(capsys, str(model), "--dtype", "bfloat16", "--max-model-len", "100", "--gpu-gib", "1")
    assert code == 0 and facts["command"] == f"blinkpy serve {model} --dtype bfloat16 --max-model-len 100"
    assert facts["cache_bytes_per_token"] == 3 * 2 * 2 * 32 * 2
    assert [one["context"] for one in facts["gpus"]] == [100, 100, 0]
    assert "does not fit on the GPU" in facts["gpus"][2]["problem"]


def test_no_tensor_is_read(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the tensors' data, the headers still list the tensors, but do not show whether the file is complete."""
    path = model / "model.safetensors"
    header = path.read_bytes()[: 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
    size = path.stat().st_size
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)  # zeros, never written
    assert look(capsys, str(model))[0] == 0
    path.write_bytes(header)
    assert "truncated" in look(capsys, str(model))[1]["problems"][0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported for Glm4MoeForCausalLM"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "model class DeepseekV32ForCausalLM is not supported"),
        ({"topk_group": 9}, "do not fit 12 experts"),
    ],
)
def test_refusals_have_their_words(model: Path, keys: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(model, **keys)
    code, facts = look(capsys, str(model))
    assert code == 1 and words in facts["problems"][0]
    assert facts["quantization"] == ("hqq" if "quantization_config" in keys else "none")
    assert facts["tokenizer"]["kind"] == "BPE", "the remaining facts are reported nevertheless"


def test_defaults_of_requests_are_checked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for values, words in (
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"eos_token_id": 1 << 31}, "eos_token_id must be a token id or a list of them, not 2147483648"),
    ):
        (model / "generation_config.json").write_text(json.dumps(values))
        code, facts = look(capsys, str(model))
        assert code == 1 and words in facts["problems"][0]


def test_all_missing_tensors_are_reported_at_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    del tensors[NEEDED]
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.norm.weight"].clone()  # a layer that predicts further tokens
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    (model / "tokenizer.json").unlink()
    change(model, unheard_of=1)
    code, facts = look(capsys, str(model))
    assert code == 1
    assert [NEEDED in facts["problems"][0], "no tokenizer.json" in facts["problems"][1]] == [True, True]
    (model / "model.safetensors").unlink()
    assert "has no weights" in look(capsys, str(model))[1]["problems"][0]


def test_unused_tensors_are_noted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.norm.weight"].clone()
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    code, facts = look(capsys, str(model))
    assert code == 0 and "ignoring unused tensors: model.layers.3.eh_proj.weight" in facts["notes"][0]


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_hub_id_only_names_of_tensors_are_fetched(
    model: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are in the index, or in the header of the single file. A missing name is a problem."""
    import huggingface_hub

    names = list(safetensors.torch.load_file(model / "model.safetensors"))
    (model / "model.safetensors").unlink()
    download, header = Mock(return_value=str(model)), Mock(return_value=SimpleNamespace(tensors=dict.fromkeys(names)))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "parse_safetensors_file_metadata", header)

    def name_tensors(these: list[str]) -> None:
        header.return_value.tensors = dict.fromkeys(these)
        if sharded:
            index = {"weight_map": dict.fromkeys(these, "model-00001-of-00002.safetensors")}
            (model / "model.safetensors.index.json").write_text(json.dumps(index))

    name_tensors(names)
    code, facts = look(capsys, "owner/model")
    assert code == 0 and facts["command"] == "blinkpy serve owner/model"
    assert not [note for note in facts["notes"] if "tensors" in note]
    for call in download.call_args_list:
        assert not [name for name in call.kwargs["allow_patterns"] if name.endswith(".safetensors")]
    name_tensors([name for name in names if name != "model.norm.weight"])
    code, facts = look(capsys, "owner/model")
    assert code == 1 and "owner/model: the checkpoint lacks model.norm.weight" in facts["problems"][0]
    name_tensors([*names, "model.layers.0.mlp.extra.weight"])
    assert "the checkpoint has model.layers.0.mlp.extra.weight, which" in look(capsys, "owner/model")[1]["problems"][0]
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    header.side_effect = OSError("no network")
    code, facts = look(capsys, "owner/model")
    assert code == 0 and any("names of its tensors were not checked" in note for note in facts["notes"])


def test_no_such_model_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-model", "no/such/folder"]) == 2
    assert "is not a folder, a hub id" in capsys.readouterr().err


def test_several_gpus_have_a_part_of_the_model_each(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = look(capsys, str(model))
    code, facts = look(capsys, str(model), "--tensor-parallel-size", "2")
    assert code == 0 and facts["command"] == f"blinkpy serve {model} --tensor-parallel-size 2"
    assert [one["gpu"] for one in facts["gpus"]] == [f"2 x {one['gpu']}" for one in alone["gpus"]]
    assert facts["weight_bytes"] == alone["weight_bytes"], "the facts of the whole model"
    change(model, num_attention_heads=6)
    _, facts = look(capsys, str(model), "--tensor-parallel-size", "4")
    assert all("can't be split over 4 ranks: it has 6 query heads" in one["problem"] for one in facts["gpus"])


def test_a_draft_head_counts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = save_head(model, tmp_path / "head", 1)
    _, alone = look(capsys, str(model))
    code, facts = look(capsys, str(model), "--speculative-model", str(head))
    assert code == 0 and facts["command"] == f"blinkpy serve {model} --speculative-model {head}"
    stored = safetensors.torch.load_file(head / "model.safetensors")
    tensors = [tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")]
    assert facts["parameters"] == alone["parameters"] | {"draft head": sum(tensor.numel() for tensor in tensors)}
    keys = 2 * HEAD["num_key_value_heads"] * HEAD["head_dim"]
    item = facts["weight_bytes"]["draft head"] // facts["parameters"]["draft head"]
    assert facts["cache_bytes_per_token"] == alone["cache_bytes_per_token"] + keys * item
    assert not any(one["problem"] for one in facts["gpus"])
    _, facts = look(capsys, str(model), "--speculative-model", str(head), "--tensor-parallel-size", "2")
    assert all("with a draft head can't be split over 2 ranks" in one["problem"] for one in facts["gpus"])
    (head / "config.json").unlink()
    code, facts = look(capsys, str(model), "--speculative-model", str(head))
    assert code == 1 and any(
        "speculative_model: " in problem and "has no config.json" in problem for problem in facts["problems"]
    )


def test_tokens_that_fit_fill_the_memory_that_the_plan_leaves(rng: np.random.Generator, saved: Path) -> None:
    """On a GPU of any size, weights and cached tokens fit the usable memory, but more tokens would not."""
    model = describe_model(saved)
    large = describe_config(json.loads((saved / "config.json").read_text()) | {"hidden_size": 2048, "num_hidden_layers": 40})
    for _ in range(50):
        one, total = (model, large)[int(rng.integers(2))], int(rng.integers(1 << 31, 1 << 37))
        config = Config().with_options({"max_model_len": int(rng.integers(0, 2)) * 200})
        found = fit(one, config, "any", total)
        config = config.with_options(step_sizes(config.scheduler, gpu=True, experts=True))
        page = one.kv_elements * 16 * 4
        left = plan_memory(config, one, 4, page, total, total).cache
        if found.problem:
            assert left < 13 * page  # of 200 tokens
            continue
        assert found.context == (config.model.max_model_len or min(one.max_position, left // page * 16))
        most = 2 * config.all_slots * -(-found.context // 16)
        assert found.cached == 16 * min(left // page, most)


def test_window_rings(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory per slot instead of per token in layers with a window; refused without such layers."""
    save_model("gemma3", tmp_path, 1)
    written, keys = json.loads((tmp_path / "config.json").read_text()), ("cache_bytes_per_token", "ring_bytes_per_slot")
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = [look(capsys, str(tmp_path), *flags) for flags in ([], ["--window-cache", "ring", "--slots", "7"])]
    assert [code for code, _ in found] == [0, 0] and found[1][1]["command"].endswith("--slots 7 --window-cache ring")
    token = 2 * 2 * 32 * 4  # keys and values, heads, size, float32
    assert [[facts[key] for key in keys] for _, facts in found] == [[3 * token, 0], [token, 2 * 48 * token]]
    code, facts = look(capsys, str(saved), "--window-cache", "ring")
    assert code == 1 and "no layer of Glm4MoeForCausalLM has a sliding window" in facts["problems"][0]


def test_nothing_heavy_is_imported() -> None:
    """It works in the base install."""
    code = "import sys, blinkpy.serving.check_model as m; print({'torch', 'numba', 'triton', 'cuda'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


def test_a_model_whose_template_takes_no_tools_writes_no_calls(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if other models of its family write calls."""
    assert look(capsys, "demo")[1]["chat"] == {"template": True, "tool_call_parser": "none", "reasoning_parser": "none"}
    template = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>{% for one in messages %}{{ one.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    assert look(capsys, str(model))[1]["chat"]["tool_call_parser"] != "none"
