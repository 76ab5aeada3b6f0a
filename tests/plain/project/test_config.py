"""The config tree and its file."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

import blinkpy.dpu.link.connectors  # noqa: F401  the options of transports are those of their files
from blinkpy.config import Config, ConfigError, as_table, help_text, load_file, options, split_address, step_sizes
from blinkpy.config.engine_options import DEFAULT_SLOTS


def read(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    file = tmp_path / "blinkpy.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_file(file)


def test_a_table_makes_the_same_config_again() -> None:
    config = Config().with_options({"port": 1, "model": "a/b", "gpu_memory_utilization": 0.5, "enable_prefix_caching": False})
    assert config != Config()
    assert Config().with_options(as_table(config)) == config


def test_option_names_are_unique_and_explained() -> None:
    names = [item.name for _, item in options()]
    assert len(names) == len(set(names))
    assert all(help_text(item) for _, item in options())


def test_a_file_may_use_tables_or_the_top_level(tmp_path: Path) -> None:
    flat = read(tmp_path, 'model = "x"\nport = 5\nenable_prefix_caching = false')
    assert flat == {"model": "x", "port": 5, "enable_prefix_caching": False}
    tables = '[model]\nmodel = "x"\n[frontend]\nport = 5\n[cache]\nenable_prefix_caching = false'
    assert read(tmp_path, tables) == flat


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 5", "unknown option 'prot'; did you mean 'port'?"),
        ("[frontend]\nprot = 5", "unknown option 'frontend.prot'"),
        ("[engine]\nport = 5", "unknown option 'engine.port'"),
        ("[nothing]\nport = 5", "unknown option 'nothing'"),
        ("port = = 5", "is not TOML"),
        (b"host = '\xff'", "is not TOML"),
    ],
)
def test_an_invalid_file_is_refused_with_place_and_reason(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        read(tmp_path, text)
    assert "blinkpy.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"port": "80"}, "port must be int, not str"),
        ({"port": True}, "port must be int, not bool"),
        ({"port": 80.0}, "port must be int, not float"),
        ({"host": 1}, "host must be str, not int"),
        ({"model": "a\0b"}, "model contains a NUL character"),
        ({"name": "a b"}, "name must be 1 to 100 letters"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be bool, not int"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be"),
        ({"max_num_seqs": 10**30}, "max_num_seqs must be 1 to 4096"),
        ({"slots": 64, "sq_entries": 32}, "at least slots"),
        ({"grammar_slots": 3, "workers": 4}, "grammar_slots (3) must be 0 or at least workers (4)"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "at least max_num_seqs"),
        ({"max_num_seqs": 64, "mixed_step_tokens": 127}, "mixed_step_tokens (127) must be at least twice max_num_seqs (64)"),
        ({"max_num_batched_tokens": 2048, "mixed_step_tokens": 2049}, "at most max_num_batched_tokens (2048)"),
        ({"mixed_step_tokens": 1024, "burst_step_tokens": 600}, "burst_step_tokens (600) needs mixed_step_tokens (1024)"),
        ({"cq_entries": 100}, "power of two"),
        ({"sq_entries": 1000}, "power of two"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
)
def test_values_are_checked_wherever_they_come_from(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Config().with_options(values)


@pytest.mark.parametrize(
    ("given", "dense", "with_experts", "elsewhere"),
    [  # max_num_batched_tokens, mixed_step_tokens, burst_step_tokens
        ({}, (8192, 512, 2048), (2048, 0, 0), (2048, 0, 0)),
        ({"max_num_seqs": 1024}, (8192, 2048, 2048), (2048, 0, 0), (2048, 0, 0)),
        ({"max_num_seqs": 4096}, (8192, 0, 0), (4096, 0, 0), (4096, 0, 0)),
        ({"max_num_batched_tokens": 1024}, (1024, 512, 1024), (1024, 0, 0), (1024, 0, 0)),
        ({"max_num_batched_tokens": 512}, (512, 0, 0), (512, 0, 0), (512, 0, 0)),
        ({"mixed_step_tokens": 4096}, (8192, 4096, 4096), (4096, 4096, 4096), (4096, 4096, 0)),
        ({"mixed_step_tokens": 1024, "burst_step_tokens": 1500}, (8192, 1024, 1500), (2048, 1024, 1500), (2048, 1024, 1500)),
        ({"max_num_batched_tokens": 2048, "mixed_step_tokens": 2048}, *[(2048, 2048, 2048)] * 2, (2048, 2048, 0)),
    ],
)
def test_step_sizes_that_are_left_open_fit_device_and_model_and_the_rest(
    given: dict[str, int], dense: tuple[int, ...], with_experts: tuple[int, ...], elsewhere: tuple[int, ...]
) -> None:
    config = Config().with_options(given)
    for gpu, experts, expected in ((True, False, dense), (True, True, with_experts), (False, False, elsewhere)):
        sizes = step_sizes(config.scheduler, gpu=gpu, experts=experts)
        assert tuple(sizes.values()) == expected
        config.with_options(sizes)  # they fit each other
    for tokens in (1, 512):
        chosen = step_sizes(config.scheduler, gpu=False, experts=False, tokens=tokens)["max_num_batched_tokens"]
        assert chosen == (max(tokens, *elsewhere[1:], config.scheduler.max_num_seqs) if elsewhere[0] == 2048 else elsewhere[0])


def test_a_size_for_bursts_needs_a_smaller_one() -> None:
    """The default on a GPU, except for models with experts."""
    scheduler = Config().with_options({"burst_step_tokens": 4096}).scheduler
    assert step_sizes(scheduler, gpu=True, experts=False)["burst_step_tokens"] == 4096
    for gpu, experts in ((True, True), (False, False)):
        with pytest.raises(ConfigError, match=r"burst_step_tokens \(4096\) needs mixed_step_tokens \(0\)"):
            step_sizes(scheduler, gpu=gpu, experts=experts)
    with pytest.raises(ConfigError, match=r"burst_step_tokens \(100\) needs mixed_step_tokens \(512\)"):
        step_sizes(Config().with_options({"burst_step_tokens": 100}).scheduler, gpu=True, experts=False)


def test_integers_are_fine_where_a_float_is_wanted() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        Config().with_options({"gpu_memory_utilization": 1})  # over the bound, but the type is fine


def accepted(**values: Any) -> bool:
    try:
        return bool(Config().with_options(values))
    except ConfigError:
        return False


def test_an_option_that_is_left_open_is_checked_as_its_value() -> None:
    """With each size of the options that are compared with it."""
    results = set()
    for power in range(1, 17):
        beside = {"sq_entries": 1 << power}
        results.add(accepted(**beside))
        assert accepted(**beside) == accepted(**beside, slots=DEFAULT_SLOTS), beside
    assert results == {False, True}


def test_an_address_is_what_was_written(seed: int) -> None:
    """Each kind of host with each kind of port, the first and the last one too."""
    draw = random.Random(seed)
    hosts = ["localhost", "a", "10.0.0.1", "node-1.example.org", "::1", "fe80::1%eth0", "0.0.0.0"]
    for host in hosts:
        written = f"[{host}]" if ":" in host else host
        for port in (0, 1, 65535, draw.randrange(65536)):
            assert split_address(f"{written}:{port}", "listen") == (host, port)
        for wrong in ("65536", "-1", "", "1.5", "\u0661", " 1", "0x1", str(draw.randrange(65536, 1 << 40))):
            with pytest.raises(ConfigError, match="listen must be HOST:PORT"):
                split_address(f"{written}:{wrong}", "listen")
    for wrong in ("", "80", "a", ":80", "::1:80", "[]:80", "a:"):
        with pytest.raises(ConfigError, match="listen must be HOST:PORT"):
            split_address(wrong, "listen")
