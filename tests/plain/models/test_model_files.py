"""Model folders: finding them, and checkpoints that are incomplete, damaged or of another model."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from support.models.model_zoo import save_model

from blinkpy.config import ConfigError
from blinkpy.models.cpu.step_progress import StepProgress
from blinkpy.models.cpu.torch_progress import unpack_mxfp4
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights import checkpoint
from blinkpy.models.weights.checkpoint import as_stored, open_checkpoint
from blinkpy.models.weights.decoder_weights import Weights, choose_dtype
from blinkpy.models.weights.model_folder import DEMO_FOLDER, resolve_model
from blinkpy.models.weights.parts.weight_parts import expected_tensors
from blinkpy.models.weights.parts.weight_sizes import weight_elements
from blinkpy.models.weights.tensor_loader import load_tensors
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model("llama2", folder / "single", 1)
    save_model("llama2", folder / "sharded", 1, sharded=True)
    save_model("llama3", folder / "tied", 2)
    save_model("qwen3-moe", folder / "experts", 3)
    save_model("gpt-oss-mxfp4", folder / "mxfp4", 4)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, to be damaged."""
    return Path(shutil.copytree(saved / "single", tmp_path / "model"))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_weights(describe_model(folder), folder, torch.float32)


def layers_of(weights: Weights) -> list[dict[str, torch.Tensor]]:
    """The tensors that each layer has, by name."""
    return [{name: value for name, value in vars(layer).items() if value is not None} for layer in weights.layers]


def test_single_and_sharded_are_the_same(saved: Path) -> None:
    assert len(list((saved / "sharded").glob("*.safetensors"))) > 2
    single, sharded = (load_weights(describe_model(saved / n), saved / n, torch.float32) for n in ("single", "sharded"))
    for ours, theirs in zip(layers_of(single), layers_of(sharded), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(single.lm_head, sharded.lm_head)
    assert not torch.equal(single.lm_head, single.embedding)


def test_tied_embeddings_share_memory(saved: Path) -> None:
    weights = load_weights(describe_model(saved / "tied"), saved / "tied", torch.float32)
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()


def test_progress_and_types(saved: Path) -> None:
    seen: list[float] = []
    weights = load_weights(describe_model(saved / "single"), saved / "single", torch.bfloat16, progress=seen.append)
    assert seen == sorted(set(seen))
    assert len(seen) > 10
    assert seen[-1] == 1
    assert {t.dtype for t in vars(weights.layers[0]).values() if t is not None} == {torch.bfloat16}


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_types_are_converted(stored: torch.dtype, tmp_path: Path) -> None:
    reference = save_model("llama2", tmp_path, 5, dtype=stored)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"float64"', '"float32"'))  # only tensors can have this type
    weights = load_weights(describe_model(tmp_path), tmp_path, torch.float32)
    assert torch.equal(weights.lm_head, reference.lm_head.weight.float())


def test_norms_to_which_1_is_added_lose_no_bits(tmp_path: Path) -> None:
    theirs = save_model("gemma3", tmp_path, 4, dtype=torch.bfloat16).model
    ours = load_weights(describe_model(tmp_path), tmp_path, torch.bfloat16)
    mine, layer = ours.layers[1], theirs.layers[1]
    for loaded, module in (
        (mine.input_norm, layer.input_layernorm),
        (mine.attention_out_norm, layer.post_attention_layernorm),
        (mine.post_norm, layer.pre_feedforward_layernorm),
        (mine.mlp_out_norm, layer.post_feedforward_layernorm),
        (mine.k_norm, layer.self_attn.k_norm),
        (ours.final_norm, theirs.norm),
    ):
        assert loaded is not None
        assert torch.equal(loaded, 1 + module.weight.float())
    assert (ours.dtype, mine.qkv.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_come_together(saved: Path, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Pieces smaller than a tensor, more of them than buffers, and of a size that divides nothing."""
    stored = open_checkpoint(describe_model(saved / "single"), saved / "single")
    targets = {name: torch.full(tensor.shape, torch.nan, dtype=dtype) for name, tensor in stored.items()}
    places = [(name, tensor, targets[name]) for name, tensor in stored.items()]
    load_tensors(places, torch.device("cpu"), threads=3, piece_bytes=4 * int(rng.integers(50, 5000)))
    expected = safetensors.torch.load_file(saved / "single" / "model.safetensors")
    assert all(torch.equal(targets[name], expected[name].to(dtype)) for name in stored)


def test_a_file_that_is_cut_short_while_it_is_read(model: Path) -> None:
    path = model / "model.safetensors"
    stored = open_checkpoint(describe_model(model), model)
    last = max(stored, key=lambda name: stored[name].offset)
    os.truncate(path, stored[last].offset + 5)
    places = [(name, tensor, torch.empty(tensor.shape)) for name, tensor in stored.items()]
    with pytest.raises(ConfigError, match=f"model.safetensors was truncated while being read: {re.escape(last)} lacks"):
        load_tensors(places, torch.device("cpu"))
    path.unlink()
    with pytest.raises(ConfigError, match=r"can't read .*: No such file"):
        load_tensors(places, torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None, r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"),
        ("model.layers.0.self_attn.q_proj.scale", {}, r"has model\.layers\.0\.self_attn\.q_proj\.scale, which LlamaForC"),
        ("model.layers.0.self_attn.q_norm.bias", {}, r"has model\.layers\.0\.self_attn\.q_norm\.bias, which LlamaForC"),
        ("model.layers.2.extra.weight", {}, r"has model\.layers\.2\.extra\.weight, which"),
        ("model.norm.weight", {"dtype": "F8_E5M2"}, r"model\.norm\.weight is F8_E5M2"),
        ("model.norm.weight", {"dtype": 7}, "7"),
        ("model.norm.weight", {"shape": [-1, 64]}, "bytes"),
        ("model.norm.weight", {"shape": [64, "x"]}, "malformed"),
        ("model.norm.weight", {"data_offsets": [0, 10]}, "10 bytes"),
        ("model.norm.weight", {"data_offsets": [-256, 0]}, "bytes"),
        ("model.norm.weight", {"data_offsets": [1 << 60, (1 << 60) + 256]}, "truncated"),
        ("model.norm.weight", {"data_offsets": None}, "malformed"),
        ("model.norm.weight", {"data_offsets": [0, float("inf")]}, "not JSON: Infinity"),
        ("model.norm.weight", {"data_offsets": [0, 256.5]}, "malformed"),
        ("model.norm.weight", {"shape": [True, 64]}, "malformed"),
    ],
)
def test_wrong_header(model: Path, tensor: str, change: dict | None, words: str) -> None:
    """A header with a missing tensor, another norm's tensor, or a changed tensor."""
    content = (model / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if change is None:
        del header[tensor]
    else:
        header[tensor] = header["model.norm.weight"] | change
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    refused(model, words)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Save a checkpoint again, with other tensors."""
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path)


def test_tensors_without_a_use_are_left_out_and_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bias that config.json switches off, a value head, layers behind the last one."""
    names = ["model.layers.1.mlp.down_proj.bias", "model.layers.3.eh_proj.weight", "mtp.fc.weight", "score.weight", "v_head.bias"]
    before = load_weights(describe_model(model), model, torch.float32)
    silent = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {name: torch.ones(3) for name in (*names, silent)} | {"v_more.weight": torch.ones(0, 3)}
    rewrite(model, lambda tensors: tensors | more)
    after = load_weights(describe_model(model), model, torch.float32)
    for ours, theirs in zip(layers_of(before), layers_of(after), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert caplog.messages == [f"{model}: ignoring unused tensors: {', '.join(names[:3])} and 3 more"]


def test_names_of_nested_models_in_both_spellings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By their published names, and by transformers' names; weights for images are left out."""
    reference = save_model("mistral3", tmp_path, 4)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(name.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")) for name in stored)
    weights = load_weights(describe_model(tmp_path), tmp_path, torch.float32)
    assert torch.equal(weights.lm_head, reference.lm_head.weight)
    assert len(caplog.messages) == 1 and "ignoring" in caplog.messages[0]
    rewrite(tmp_path, lambda tensors: {name: tensor.clone() for name, tensor in reference.state_dict().items()})
    assert "model.language_model.norm.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")
    other = load_weights(describe_model(tmp_path), tmp_path, torch.float32)
    for ours, theirs in zip(layers_of(weights), layers_of(other), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    rewrite(tmp_path, lambda tensors: tensors | {"language_model.model.other.weight": torch.ones(3)})
    refused(tmp_path, r"language_model\.model\.other\.weight, which")


def test_llama4_in_our_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Heads whose neighbours are rotated together, if they are rotated; experts as linear layers; and nothing
    for images."""
    theirs = save_model("llama4-nested", tmp_path, 4, attention_bias=True).language_model.model
    model = describe_model(tmp_path)
    ours = load_weights(model, tmp_path, torch.float32)
    (message,) = caplog.messages
    assert re.search("ignoring unused tensors: multi_modal_projector.linear_1.weight, vision_model", message)
    pairs = torch.tensor([*range(0, 32, 2), *range(1, 32, 2)])  # rows of a head, as the checkpoint has them
    for index, (mine, layer) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        rows = pairs if model.layers[index].attention.rope.neighbours else torch.arange(32)
        for part, bias in zip(("q_proj", "k_proj", "v_proj"), ((0, 128), (128, 192), (192, 256)), strict=True):
            stored, some = getattr(layer.self_attn, part), slice(*bias)
            order = rows if part != "v_proj" else torch.arange(32)
            assert mine.qkv_bias is not None and isinstance(mine.qkv, torch.Tensor)
            assert torch.equal(mine.qkv[some], stored.weight.unflatten(0, (-1, 32))[:, order].flatten(0, 1))
            assert torch.equal(mine.qkv_bias[some], stored.bias.unflatten(0, (-1, 32))[:, order].flatten())
        experts = layer.feed_forward.experts
        assert isinstance(mine.gate_up, torch.Tensor) and torch.equal(mine.gate_up, experts.gate_up_proj.mT)
        assert isinstance(mine.down, torch.Tensor) and torch.equal(mine.down, experts.down_proj.mT)
        norms = [norm for norm in (mine.q_norm, mine.k_norm) if norm is not None]
        assert len(norms) == (0 if index == 1 else 2) and all(torch.equal(norm, torch.ones(32)) for norm in norms)
    assert weight_elements(model) == sum(tensor.numel() for tensor in theirs.parameters()) + ours.lm_head.numel()


def test_the_bias_of_a_choice_stays_float32(tmp_path: Path) -> None:
    """It decides between experts that are nearly equal."""
    save_model("glm4-moe", tmp_path, 4)
    weights = load_weights(describe_model(tmp_path), tmp_path, torch.bfloat16)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias = weights.layers[1].selection_bias
    assert bias is not None and torch.equal(bias, stored) and not torch.equal(bias, stored.bfloat16().float())
    dummy = dummy_weights(describe_model(tmp_path), 1, torch.bfloat16).layers[1].selection_bias
    assert dummy is not None and dummy.dtype == torch.float32


def test_a_checkpoint_saved_without_its_head_has_shorter_names(saved: Path, tmp_path: Path, model: Path) -> None:
    folder = Path(shutil.copytree(saved / "tied", tmp_path / "bare"))
    transformers.AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base")
    shutil.copy(tmp_path / "base" / "model.safetensors", folder)
    assert "norm.weight" in safetensors.torch.load_file(folder / "model.safetensors")
    bare, whole = (load_weights(describe_model(f), f, torch.float32) for f in (folder, saved / "tied"))
    for ours, theirs in zip(layers_of(bare), layers_of(whole), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(bare.lm_head, whole.lm_head)
    rewrite(model, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    load_weights(describe_model(model), model, torch.float32)
    rewrite(model, lambda tensors: {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    refused(model, r"lacks lm_head\.weight, which .* with this config\.json$")
    rewrite(model, lambda tensors: {f"module.{name}": value for name, value in tensors.items()})
    refused(model, r"lacks model\.embed.* with this config\.json; it has module\.")


def test_a_stored_head_that_differs_is_not_tied(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers."""
    folder = Path(shutil.copytree(saved / "tied", tmp_path / "tied"))
    embedding = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": embedding.clone()})
    description = describe_model(folder)
    assert as_stored(description, folder) is description and caplog.messages == []
    other = embedding.clone()
    other[-1, -1] += 1
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": other})
    untied = as_stored(description, folder)
    assert not untied.tied_embeddings and "instead of tied embeddings" in caplog.text
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reference.lm_head.weight, other)
    assert torch.equal(load_weights(untied, folder, torch.float32).lm_head, other)


def test_a_stored_head_with_the_bytes_of_another_dtype_differs(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "tied", tmp_path / "tied"))
    narrow = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"].half()
    for head, tied in ((narrow.clone(), True), (narrow.view(torch.bfloat16).clone(), False)):
        rewrite(folder, lambda tensors, head=head: tensors | {"model.embed_tokens.weight": narrow, "lm_head.weight": head})
        assert as_stored(describe_model(folder), folder).tied_embeddings == tied


def test_a_stored_head_is_compared_to_its_end(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Whichever of its numbers differs, in however many pieces they are read."""
    folder = Path(shutil.copytree(saved / "tied", tmp_path / "tied"))
    description = describe_model(folder)
    embedding = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    size = embedding.nbytes
    for piece in (size, size // 2, size - 1, int(rng.integers(100, size))):
        monkeypatch.setattr(checkpoint, "COMPARED_BYTES", piece)
        head = embedding.clone()
        rewrite(folder, lambda tensors, head=head: tensors | {"lm_head.weight": head})
        assert as_stored(description, folder) is description
        for place in (0, head.numel() - 1, int(rng.integers(head.numel()))):
            other = embedding.clone()
            other.view(-1)[place] += 1
            rewrite(folder, lambda tensors, other=other: tensors | {"lm_head.weight": other})
            assert not as_stored(description, folder).tied_embeddings


def test_other_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    refused(model, r"gate_proj\.weight has shape \[96, 64\], but config\.json requires \[100, 64\]")


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 3000, -1])
def test_truncated_file(model: Path, kept: int) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:kept])
    refused(model, r"model\.safetensors is (truncated|no safetensors)")


def test_random_damage_never_crashes(model: Path, rng: np.random.Generator) -> None:
    """Any bytes in the header: a clear error, or a checkpoint that still fits."""
    content = (model / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", content[:8])[0]
    description = describe_model(model)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            damaged[int(rng.integers(length))] = int(rng.integers(256))
        (model / "model.safetensors").write_bytes(damaged)
        try:
            found = open_checkpoint(description, model)
        except ConfigError:
            continue
        assert {name: tensor.shape for name, tensor in found.items()} == expected_tensors(description)
        load_weights(description, model, torch.float32)


def test_index_of_shards(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.rename(folder / "away")
    refused(folder, f"has no {shard.name}, which")
    (folder / "away").rename(shard)
    for text, words in (("{", "not JSON"), ("{}", "not an index"), ('{"weight_map": {"x": "../model.safetensors"}}', "outside")):
        index.write_text(text)
        refused(folder, words)
    index.write_text(good)
    shutil.copy(shard, folder / "model-copy.safetensors")
    index.write_text(json.dumps({"weight_map": {**json.loads(good)["weight_map"], "x": "model-copy.safetensors"}}))
    refused(folder, "is both in")


def test_random_weights(saved: Path) -> None:
    model = describe_model(saved / "experts")
    first, again, other = (dummy_weights(model, seed, torch.float32) for seed in (1, 1, 2))
    assert first.layers[2].gate_up.std() == pytest.approx(1e-3 / 3**0.5, rel=0.1)
    assert (first.layers[2].input_norm == 1).all()
    loaded = load_weights(model, saved / "experts", torch.float32)
    shapes, wanted = ([{k: t.shape for k, t in layer.items()} for layer in layers_of(w)] for w in (first, loaded))
    assert shapes == wanted
    assert torch.equal(first.layers[2].gate_up, again.layers[2].gate_up)
    assert not torch.equal(first.layers[2].gate_up, other.layers[2].gate_up)


def test_packed_weights_stay_packed(saved: Path, tmp_path: Path) -> None:
    """Loaded and random ones have the same bytes; other types are refused, and so are bytes where numbers belong."""
    model = describe_model(saved / "mxfp4")
    loaded, dummy = load_weights(model, saved / "mxfp4", torch.float32), dummy_weights(model, 1, torch.float32)
    for weights in (loaded, dummy):
        layer = weights.layers[1]
        packed = {name: tuple(t.shape) for name, t in vars(layer).items() if t is not None and t.dtype == torch.uint8}
        shapes = ((8, 64, 32), (8, 64, 16), (8, 64, 2), (8, 64, 1))
        assert packed == dict(zip(("gate_up", "down", "gate_up_scales", "down_scales"), shapes, strict=True))
    unpacked = unpack_mxfp4(layer.gate_up[0], layer.gate_up_scales[0], torch.float32, StepProgress())
    assert 0.5e-3 < unpacked.abs().max() <= 1e-3
    tensors = safetensors.torch.load_file(saved / "mxfp4" / "model.safetensors")
    (tmp_path / "config.json").write_text((saved / "mxfp4" / "config.json").read_text())
    wrong = (("gate_up_proj_blocks", torch.int8), ("down_proj_scales", torch.float16), ("q_proj.weight", torch.uint8))
    for ending, dtype in wrong:
        name = next(name for name in tensors if name.endswith(ending))
        safetensors.torch.save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
        refused(tmp_path, f"{ending} is .*; supported: ")


def test_choice_of_dtype(saved: Path) -> None:
    model = describe_model(saved / "single")
    assert choose_dtype(model, "auto", "cpu") == torch.float32
    assert choose_dtype(model, "bfloat16", "cpu") == torch.bfloat16
    half = type(model)(**{**vars(model), "dtype": "float16"})
    assert choose_dtype(half, "auto", "cpu") == torch.float32
    assert choose_dtype(half, "auto", "cuda") == torch.float16
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype(model, "float16", "cpu")


def test_local_folder(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        resolve_model(str(model))
    (model / "tokenizer.json").write_text("{}")
    assert resolve_model(str(model)) == model
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no weights.*pytorch_model\.bin can't be used"):
        resolve_model(str(model))
    assert resolve_model(str(model), weights=False) == model
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(model), weights=False)


@pytest.mark.parametrize("argument", ["none/such/folder", "nothing", "../no-such-folder"])
def test_no_such_model(argument: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(argument) + ".*is not a folder"):
        resolve_model(argument)


def test_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the needed files are requested; failures name the model and a remedy."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    (model / "tokenizer.json").write_text("{}")
    download = Mock(return_value=str(model))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model") == model
    assert resolve_model("owner/model", weights=False) == model
    first, second = download.call_args_list
    assert first.args == second.args == ("owner/model",)
    assert "model-*.safetensors" in first.kwargs["allow_patterns"]
    assert not any(pattern.endswith(".safetensors") for pattern in second.kwargs["allow_patterns"])
    download.side_effect = LocalEntryNotFoundError("no connection")
    with pytest.raises(ConfigError, match=r"owner/model.*can't be reached"):
        resolve_model("owner/model")
    download.side_effect = None
    (model / "tokenizer.json").unlink()  # files of other forms are not fetched
    with pytest.raises(
        ConfigError, match=r"no tokenizer\.json; another format .*tekken\.json.*must be converted first \(docs/models\.md\)$"
    ):
        resolve_model("owner/model")


@pytest.mark.parametrize(
    ("missing", "other", "remedy"),
    [
        ("tokenizer.json", "tekken.json", "python -c .*convert_tekken_tokenizer"),
        ("tokenizer.json", "tokenizer.model", r'python -c "from transformers import AutoTokenizer; .*save_pretrained'),
        ("tokenizer.json", "vocab.json", r'python -c "from transformers import AutoTokenizer; .*save_pretrained'),
        ("config.json", "params.json", "transformers' format is needed"),
    ],
)
def test_a_checkpoint_of_another_form(model: Path, missing: str, other: str, remedy: str) -> None:
    """One line says what to do."""
    (model / "tokenizer.json").write_text("{}")
    (model / missing).unlink()
    (model / other).write_text("{}")
    with pytest.raises(ConfigError, match=rf"has no {re.escape(missing)}; {re.escape(other)} .*{remedy}") as found:
        resolve_model(str(model))
    assert "\n" not in str(found.value)


def test_built_in_model() -> None:
    assert resolve_model(None) == resolve_model("demo") == DEMO_FOLDER
