"""The command line: generated from the config, one line for every error, the spellings that people know."""

import logging
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blinkpy import __version__, cli
from blinkpy.config import Config, as_table, option_type, options
from blinkpy.dpu.watch.log_output import OWN

ROOT = Path(__file__).parents[3]

Given = tuple[Config, frozenset[str]]


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Iterator[None]:
    """Some commands run in this process, and change its logging, as they own their process otherwise."""
    own = logging.getLogger(OWN)
    level, hooks = own.level, (sys.excepthook, threading.excepthook)
    yield
    own.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Given:
    return cli.resolve(vars(cli.make_parser().parse_args(arguments)), environment or {})


def test_defaults_are_the_configs_own() -> None:
    config, given = parse("serve")
    assert config == Config()
    assert given == frozenset()


# The spellings of vLLM that people bring along.
KNOWN: dict[str, dict[str, Any]] = {
    "frontend": {"host": "0.0.0.0", "port": 9000, "api_key": "secret", "workers": 3},
    "model": {"served_model_name": "tiny", "max_model_len": 512, "dtype": "bfloat16", "seed": 7, "chat_template": "chat.jinja"},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "policy": "priority"},
    "cache": {"gpu_memory_utilization": 0.5},
    "engine": {"device": "null"},
}


@pytest.mark.parametrize(("section", "name"), [(section, name) for section, values in KNOWN.items() for name in values])
def test_known_spellings_reach_the_config(section: str, name: str) -> None:
    value = KNOWN[section][name]
    config, given = parse("serve", "some/model", f"--{name.replace('_', '-')}", str(value))
    assert getattr(getattr(config, section), name) == value
    assert config.model.model == "some/model"
    assert given == {"model", name}


def test_prefix_caching_can_be_switched_both_ways() -> None:
    assert parse("serve", "--enable-prefix-caching")[0].cache.enable_prefix_caching
    assert not parse("serve", "--no-enable-prefix-caching")[0].cache.enable_prefix_caching


def test_every_option_is_a_flag_with_its_default_and_bounds_in_the_help() -> None:
    """Of serve, except the options that connect the halves when they are started separately, and those of a
    front end only."""
    commands = next(a for a in cli.make_parser()._actions if a.dest == "command").choices
    texts = {name: " ".join(command.format_help().split()) for name, command in commands.items()}
    for section, item in options():
        apart = section == "transport" or item.metadata["commands"] == "frontend"
        text = texts["engine"] + texts["frontend"] if apart else texts["serve"]
        assert cli.flag(item) in text
        assert not apart or f"{cli.flag(item)} " not in texts["serve"]
        if item.metadata["low"] is not None:
            assert f"[{item.metadata['low']} to {item.metadata['high']}; default: {item.default}]" in text
        for choice in item.metadata["choices"]:
            assert choice in text


def test_each_half_has_its_own_options() -> None:
    engine = {item.name for _, item in options("engine")}
    frontend = {item.name for _, item in options("frontend")}
    assert {"model", "name", "max_num_seqs", "num_pages", "workers"} <= engine
    assert {"model", "name", "host", "port", "workers", "api_key", "chat_template"} <= frontend
    assert not {"host", "port", "api_key"} & engine
    assert not {"max_num_seqs", "num_pages", "policy"} & frontend
    served = {"restart", "engine_hang_s", "data_parallel_size"}
    assert engine | frontend | served == {item.name for _, item in options()}, "an option belongs to neither half"


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "blinkpy.toml"
    file.write_text('port = 1111\n[frontend]\napi_key = "file"\nworkers = 2\n')
    environment = {"BLINKPY_API_KEY": "environment"}
    both = ("serve", "--config", str(file))
    assert parse(*both)[0].frontend.api_key == "file"
    assert parse(*both, environment=environment)[0].frontend.api_key == "environment"
    assert parse(*both, "--api-key", "flag", environment=environment)[0].frontend.api_key == "flag"
    config, given = parse(*both, "--port", "2222")
    assert (config.frontend.port, config.frontend.workers, config.frontend.host) == (2222, 2, "127.0.0.1")
    assert given == {"port", "api_key", "workers"}


def test_without_arguments_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n    {command.name}" in shown for command in (*cli.COMMANDS, *cli.TOOLS))


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as pipe:
        done = subprocess.run([sys.executable, "-m", "blinkpy", "doctor"], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "\\xe9\\udcff"), ("utf-8:strict", "é\\udcff")])
def test_a_name_that_the_output_can_t_show_is_no_error(tmp_path: Path, encoding: str, shown: str) -> None:
    folder = tmp_path / "é\udcff"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    command = [sys.executable, "-m", "blinkpy", "check-model", str(folder)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert done.returncode == 1 and done.stderr == b""
    assert shown in done.stdout.decode()


WRONG = {
    "no command": (("--",), "COMMAND"),
    "unknown command": (("fly",), "'fly'"),
    "unknown flag": (("serve", "--fly"), "--fly"),
    "misspelled flag": (("serve", "--max-modle-len=5"), "unknown argument '--max-modle-len=5'; did you mean '--max-model-len'?"),
    "abbreviated flag": (("serve", "--max-model", "5"), "--max-model"),
    "option of the other half": (("frontend", "--max-num-seqs", "5"), "--max-num-seqs"),
    "not a number": (("serve", "--port", "x"), "--port"),
    "over the bound": (("serve", "--port", "65536"), "port must be 0 to 65535, not 65536"),
    "under the bound": (("serve", "--max-num-seqs", "0"), "max_num_seqs must be 1 to 4096, not 0"),
    "not a number at all": (("serve", "--gpu-memory-utilization", "nan"), "gpu_memory_utilization"),
    "no such choice": (("serve", "--device", "tpu"), "device must be one of auto, cpu, cuda, null"),
    "not a power of two": (("serve", "--page-size", "24"), "page_size must be a power of two"),
    "two models": (("serve", "a", "--model", "b"), "two models"),
    "no such file": (("serve", "--config", "/nowhere/x.toml"), "can't read /nowhere/x.toml"),
    "no value": (("serve", "--port"), "--port"),
    "engine without its address": (("engine", "--transport", "rdma"), "--transport rdma needs --listen HOST:PORT"),
    "front end without its address": (("frontend", "--transport", "rdma"), "--transport rdma needs --engine HOST:PORT"),
    "address without rdma": (("engine", "--listen", "x:1"), "--listen needs --transport rdma"),
    "queue memory without rdma": (("engine", "--queue-memory", "dmabuf"), "--queue-memory needs --transport rdma"),
    "device without rdma": (("frontend", "--rdma-device", "mlx5_0"), "--rdma-device needs --transport rdma"),
    "no address at all": (("engine", "--transport", "rdma", "--listen", "x"), "listen must be HOST:PORT, not 'x'"),
    "two ways": (("frontend", "--transport", "rdma", "--engine", "x:1", "--name", "y"), "--name works only on"),
    "unknown way": (("engine", "--transport", "tcp"), "transport must be one of shm"),
    "the other half's": (("frontend", "--listen", "x:1"), "--listen"),
    "the other half's memory": (("frontend", "--queue-memory", "host"), "--queue-memory"),
    "transport of a server in one piece": (("serve", "--transport", "rdma"), "--transport"),
    "engine's device without rdma": (("engine", "--rdma-device", "mlx5_0"), "--rdma-device needs --transport rdma"),
    "a name that is a path": (("serve", "--name", "a/b"), "name must be 1 to 100 letters, digits,"),
    "a name that is too long": (("engine", "--name", "x" * 101), "name must be 1 to 100 letters, digits,"),
    "a name that is empty": (("frontend", "--name", ""), "name must be 1 to 100 letters, digits,"),
    "a name of a recording": (("record", "../a"), "name must be 1 to 100 letters, digits,"),
    "an empty key": (("serve", "--api-key", ""), "api_key is empty"),
    "no file of keys": (("frontend", "--api-keys", ""), "api_keys is empty"),
    "a key with a line end": (("serve", "--api-key", "secret\n"), "api_key must fit into a header"),
    "a deep list": (("serve", "--allowed-origins", "[" * 100_000), "allowed_origins is not a JSON list"),
    "an engine at no address": (("frontend", "--transport", "rdma", "--engine", "here"), "engine must be HOST:PORT, not 'here'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_one_line_and_exit_code_2(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("engine_process", "frontend_process", "serve"):
        monkeypatch.setattr(f"blinkpy.serving.{command}.find_model", lambda *_, **__: pytest.fail("it starts"))
    arguments, reason = WRONG[case]
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blinkpy: error: ")
    assert err.count("\n") == 1
    assert reason in err


def test_numbers_at_the_bounds_are_accepted() -> None:
    together = ("ssl_cert_reqs", "slots", "sq_entries", "cq_entries", "page_size", "response_store_count")
    sizes = ("max_num_seqs", "max_num_batched_tokens", "mixed_step_tokens", "burst_step_tokens")
    drafts = ("speculative_tokens", "speculative_requests", "speculative_match")
    for section, item in options():
        commands = item.metadata["commands"]
        command = (commands or "engine").split()[0] if section == "transport" or commands == "frontend" else "serve"
        for bound in (item.metadata["low"], item.metadata["high"]):
            if bound is None or item.name in (*together, *sizes, *drafts):  # those are checked against each other as well
                continue
            config, _ = parse(command, cli.flag(item), str(option_type(item)(bound)))
            assert as_table(config)[item.name] == bound


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "blinkpy", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"blinkpy {__version__}\n", "")


def test_the_reference_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "write_cli_reference.py"), run_name="__main__")
    assert (ROOT / "docs" / "cli.md").read_text() == capsys.readouterr().out, "the options changed: run `make docs`"
