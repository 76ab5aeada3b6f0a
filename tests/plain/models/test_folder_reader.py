"""A model's folder is not trusted: tests of the files that `blinkpy.model_files` refuses, and that all code reads a folder
through it."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.import_graph import package_modules

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.fleet.identity import tokenizer_digest
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.dpu.text.tokenizer import LONGEST, MOST_ENDS, Tokenizer
from blinkpy.dpu.text.tokenizer_files import MOST_ADDED
from blinkpy.engine.sizing import model_digest
from blinkpy.model_files import DEEPEST, DIGITS, LIMITS, MOST_VALUES, open_file, parse_json, read_bytes, read_text
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.model_folder import DEMO_FOLDER, resolve_model
from blinkpy.models.weights.stored_tensor import INDEX, SINGLE, read_header
from blinkpy.serving.model_facts import model_facts

# Files of a folder, and their readers.
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        SINGLE,
        INDEX,
    ),
)
SECRET = "root:x:0:0"
# Every module that opens files, and the kind of files. A model's file is opened by `model_files` alone.
OPENERS = {
    "cli": "the null device",
    "config.option_tree": "--config",
    "device.compile_cache": "locks of compiled code",
    "device.lanes": "sources",
    "dpu.admission.keys_file": "--api-keys-file",
    "dpu.engine_starts": "shared memory",
    "dpu.fleet.engine_list": "--engines-file",
    "dpu.fleet.placement_rules": "a placement of the operator",
    "dpu.fork_server.forked_jobs": "/proc",
    "dpu.http.metrics_page": "a page of the package",
    "dpu.http.wire.listener": "the null device",
    "dpu.link.connect_rdma": "anonymous memory",
    "dpu.link.connect_shm": "shared memory",
    "dpu.supervisor": "shared memory",
    "dpu.worker": "shared memory",
    "engine.sizing": "/sys",
    "kernels.config_files": "tables of the package",
    "kernels.loop_kernels": "compiled code",
    "llm": "the null device",
    "model_files": "files of a model's folder",
    "models.cpu.cpu_attention": "/proc",
    "processes": "the null device",
    "recording.recording_memory": "shared memory",
    "recording.recording_reader": "shared memory and recordings",
    "scheduler.policies": "a policy of the operator",
    "scheduler.policy_trial": "the child's channels",
    "serving.kept_engine": "shared memory",
    "serving.model_facts": "results of the package",
    "sources": "sources",
    "transport.link_key": "--link-key-file",
    "transport.segment": "shared memory",
    "verify.policy_check.check_workload": "a workload of the operator",
    "verify.replay.replay_command": "/proc, and the written picture",
    "verify.sim.runs": "a scenario of the operator",
}
OPENING = {
    "read_text",
    "read_bytes",
    "mmap",
    "memmap",
    "fromfile",
    "FileIO",
    "load_file",
    "safe_open",
    "from_pretrained",
    "from_file",
}


def write_header(path: Path, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demonstration model, with each file that a folder can have."""
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": SINGLE}}))
    return folder


def read_all(folder: Path, name: str) -> None:
    """Read a folder in every way in which the package does. name: the damaged file; it decides which of two
    files is read."""
    if name == SINGLE:
        (folder / INDEX).unlink(missing_ok=True)
    if name == "chat_template.json":
        (folder / "chat_template.jinja").unlink()
    if name in ("special_tokens_map.json", "added_tokens.json"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("added_tokens_decoder", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    resolve_model(str(folder))
    model = describe_model(folder)
    tokenizer = Tokenizer(folder)
    assert load_template(folder, {k: v for k, v in tokenizer.config.items() if k != "chat_template"}, "", 1000) is not None
    tokenizer_digest(folder)
    model_digest(Config(), folder, reads_weights=True)
    load_array_weights(model, folder)


def refuses(folder: Path, name: str, words: str) -> None:
    """Both the readers and `check-model` refuse, with the file and the reason."""
    with pytest.raises(ConfigError, match=words) as found:
        read_all(folder, name)
    assert Path(name).name in str(found.value) and SECRET not in str(found.value)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        made.bind(path.name)
        os.chdir(here)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to a file of the host": (lambda path: path.symlink_to(path.parents[3] / "secret"), "leads out of the model's folder"),
    "a link to an endless device": (lambda path: path.symlink_to("/dev/zero"), "leads out of the model's folder"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "can't read"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "can't read"),
    "a FIFO": (fifo, "is a FIFO"),
    "a directory": (lambda path: path.mkdir(), "is a directory"),
    "a socket": (listening, "is a socket"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_paths_other_than_regular_files_are_refused(folder: Path, name: str, damage: str) -> None:
    for above in (folder.parents[1], folder.parents[2], folder.parent):
        (above / "secret").write_text(SECRET)
    make, words = DAMAGES[damage]
    (folder / name).unlink()
    make(folder / name)
    refuses(folder, name, words)


def test_all_of_it_can_be_read(folder: Path) -> None:
    for at, name in enumerate(FILES):
        copy = Path(shutil.copytree(folder, folder.parent / str(at)))
        read_all(copy, name)


def test_check_model_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.serving.model_facts.names_on_hub", lambda folder, hub_id: None)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("/etc/hostname")
    (problem,) = model_facts(folder, Config(), hub_id="some/model", gpus={}).problems
    assert "chat_template.jinja leads out of the model's folder" in problem


def test_links_within_the_folder_and_to_the_blobs_of_the_hub(folder: Path, tmp_path: Path) -> None:
    hub = tmp_path / "models--a--b"
    snapshot = hub / "snapshots" / "0123"
    (hub / "blobs").mkdir(parents=True)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, hub / "blobs" / file.name)
        link.symlink_to(os.path.relpath(hub / "blobs" / file.name, link.parent))
    read_all(snapshot, INDEX)
    (tmp_path / "linked").symlink_to(snapshot)  # the operator's own link
    read_all(tmp_path / "linked", INDEX)
    (snapshot / "own").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("own")
    read_all(snapshot, INDEX)
    for blob in ("/etc/hostname", "../other"):  # a blob that is a link itself
        (hub / "other").write_text(SECRET)
        (hub / "blobs" / "config.json").unlink()
        (hub / "blobs" / "config.json").symlink_to(blob)
        refuses(snapshot, "config.json", "leads out of the model's folder")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_names_never_lead_out_of_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text(SECRET)
    (folder / "a").mkdir()
    with pytest.raises(ConfigError, match="leads out of"):
        open_file(folder, name)


@pytest.mark.parametrize("name", [name for name in FILES if name != SINGLE])
def test_a_file_has_a_largest_size(folder: Path, name: str) -> None:
    """Sparse: no byte of a file that is too large is read, but as many bytes as permitted."""
    limit = next(limit for end, limit in LIMITS.items() if f"/{name}".endswith(end))
    os.truncate(folder / name, limit)
    assert len(read_bytes(folder, name)) == limit
    os.truncate(folder / name, limit + 1)
    refuses(folder, name, f"larger than {limit:,} bytes")


BAD_JSON = {
    "not JSON: NaN": '{"a": NaN}',
    "not JSON: -Infinity": '{"a": [-Infinity]}',
    "not JSON: no float64": '{"a": 1e999}',
    "not JSON: a number has": '{"a": 1%s}' % ("0" * DIGITS),
    "not JSON: Exp": "",
    "must hold an object": "[]",
    "nests more than": '{"a": %s}' % ("[" * DEEPEST + "]" * DEEPEST),
    "nests more": f'{{"a": {"[" * (MOST_VALUES // 2)}',
    "more than [0-9,]+ values": '{"a": [%s0]}' % ("0," * MOST_VALUES),
    "not JSON: Unterminated": '{"a": "%s' % ('\\"' * 8_000_000 + "," * MOST_VALUES),
}


@pytest.mark.parametrize("words", BAD_JSON)
def test_json_that_would_make_something_large(words: str) -> None:
    with pytest.raises(ConfigError, match=f"it.*{words}"):
        parse_json(BAD_JSON[words].encode(), "it")


def test_json_that_models_have() -> None:
    text = {"a": [1e30, int(1e30), -1.5e-300, ["," * (MOST_VALUES + 1)]], "b": {}}
    assert parse_json(json.dumps(text).encode(), "it") == text
    with pytest.raises(ConfigError, match="it is not JSON"):
        parse_json(json.dumps(text).encode("utf-16"), "it")


def test_text_is_utf8(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja.*not UTF-8.*at byte 2"):
        read_text(folder, "chat_template.jinja")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("value", [1 << 31, 1 << 40, 10**38, 1e30, -1, True, "1", None, [1]])
def test_numbers_that_would_make_something_large(folder: Path, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=key):
        describe_model(folder)


def test_special_tokens_are_few_and_short(folder: Path) -> None:
    original = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}

    def write(names: Iterator[str]) -> None:
        more = [{"id": 100_000 + at, "content": name, **flags} for at, name in enumerate(names)]
        (folder / "tokenizer.json").write_text(json.dumps({**original, "added_tokens": [*original["added_tokens"], *more]}))

    write(f"<|{at}|>" for at in range(4000))
    assert Tokenizer(folder).encode("<|7|>", add_special_tokens=False, parse_special=True).size == 1  # 4000 cost little
    write(f"<|{at}|>" for at in range(MOST_ADDED + 1))
    with pytest.raises(ConfigError, match="added tokens; at most"):
        Tokenizer(folder)
    write(iter(["<" * (LONGEST + 1)]))
    with pytest.raises(ConfigError, match="special tokens are too long"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text(json.dumps(original))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5] * (MOST_ENDS + 1)}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        Tokenizer(folder)


@pytest.mark.parametrize("shape", [[1] * 17, [10**30, 10**30], [1 << 62, 4], [1.0], [-1]])
def test_tensors_of_a_header_are_bounded(tmp_path: Path, shape: list[float]) -> None:
    write_header(tmp_path / SINGLE, {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})
    with pytest.raises(ConfigError, match=SINGLE):
        list(read_header(tmp_path / SINGLE))


def _opens(tree: ast.AST) -> bool:
    """Whether a module calls something that opens a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open" | "FileIO")):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os" | "io" | "path" | "file"), attr="open")):
                return True
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(), *_]):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="load")):
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in OPENING:
                if not (isinstance(node.func, ast.Name) and name.startswith("read_")):  # those of model_files
                    return True
    return False


def test_only_listed_modules_open_files() -> None:
    """A module that opens a file has its line here, which states that the file is not a model's."""
    opening = {name.removeprefix("blinkpy.") for name, path in package_modules().items() if _opens(ast.parse(path.read_text()))}
    assert opening == OPENERS.keys()


def test_opens_of_a_run_go_through_the_reader(folder: Path) -> None:
    """All readers under an audit hook: each file that Python opens below the folder is opened by `model_files`."""
    script = f"""
import json, os, sys
folder, others, read = {str(folder)!r}, set(), set()
def hook(event, arguments):
    if event == "open" and str(arguments[0]).startswith(folder):
        frame, files = sys._getframe(), set()
        while frame is not None:
            files.add(os.path.basename(frame.f_code.co_filename))
            frame = frame.f_back
        (read if "model_files.py" in files else others).add(os.path.relpath(arguments[0], folder))
from pathlib import Path
from blinkpy.cli import main
from plain.models.test_folder_reader import read_all
sys.addaudithook(hook)
read_all(Path(folder), "")
assert main(["check-model", folder]) == 0
print(json.dumps([sorted(others), sorted(read)]))
"""
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    used = sorted({*FILES} - {"chat_template.json"})  # next to chat_template.jinja
    assert json.loads(run.stdout.splitlines()[-1]) == [[], used]


def test_all_bytes_of_a_file_are_read(rng: np.random.Generator, tmp_path: Path) -> None:
    content = rng.bytes(int(rng.integers(1, 10_000)))
    (tmp_path / "chat_template.jinja").write_bytes(content)
    assert read_bytes(tmp_path, "chat_template.jinja") == content
