"""Transports: each has both ends, found by their files' names; which one a server uses follows from its options alone."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from blinkpy import config as config_module
from blinkpy.config import Config, ConfigError, as_table, options
from blinkpy.dpu.link import connectors
from blinkpy.engine.link import listeners
from blinkpy.transport.contract import check_end, chosen_end, ends_in
from blinkpy.transport.verbs import RdmaOptions

PACKAGE = Path(config_module.__file__).parents[1]


def test_each_transport_has_both_ends() -> None:
    names = {"dpu/link": "connect_*.py", "engine/link": "listen_*.py"}
    for (folder, pattern), ends in zip(names.items(), (connectors.ENDS, listeners.ENDS), strict=True):
        files = [path.stem.partition("_")[2] for path in (PACKAGE / folder).glob(pattern)]
        assert sorted(files) == sorted(ends)
    for front, back in zip(connectors.ENDS.values(), listeners.ENDS.values(), strict=True):
        assert front[:3] == back[:3]  # name, doc, crosses_machines
        assert front.open is not back.open
        assert config_module.TRANSPORTS[front.name] == front.doc
    assert list(connectors.ENDS) == list(listeners.ENDS)
    assert {"shm", "rdma"} <= set(connectors.ENDS)
    crossing = [end.crosses_machines for end in connectors.ENDS.values()]
    assert crossing == sorted(crossing), "first those within one machine"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package with one end and a separate option; its additions to Config are removed again."""
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "__init__.py").write_text("")
    (tmp_path / "toys" / "no_transport.py").write_text("raise AssertionError('not a transport')")
    (tmp_path / "toys" / "connect_toy.py").write_text(
        "from dataclasses import dataclass\n"
        "from blinkpy.config import extends, option\n"
        "from blinkpy.transport.contract import End\n"
        "@extends('transport')\n@dataclass(frozen=True)\n"
        "class ToyOptions:\n    toy_size: int = option(3, 'of a toy', low=1, high=9)\n"
        "def connect(config, worker):\n    return worker, config.extension(ToyOptions).toy_size\n"
        "END = End('toy', 'to play with', True, ToyOptions, connect)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict(config_module.TRANSPORTS), patch.dict(config_module.EXTENSIONS):
        yield ends_in("toys", "connect_*")
    for name in [name for name in sys.modules if name.split(".")[0] == "toys"]:
        del sys.modules[name]
    ends_in.cache_clear()


def test_a_file_with_an_end_is_a_transport(toy: Any) -> None:
    assert list(toy) == ["toy"]
    config = Config().with_options({"transport": "toy", "toy_size": 7})
    assert chosen_end(toy, config).open(config, "somebody") == ("somebody", 7)
    assert "toy_size" in {item.name for _, item in options("engine")} & {item.name for _, item in options("frontend")}
    assert Config().with_options(as_table(config)) == config
    with pytest.raises(ConfigError, match="toy_size must be 1 to 9"):
        config.with_options({"toy_size": 10})
    with pytest.raises(ConfigError, match=r"transport must be one of .*shm, .*toy.*, not 'pigeon'"):
        config.with_options({"transport": "pigeon"})
    with pytest.raises(ConfigError, match="transport must be one of toy, not 'shm'"):
        chosen_end(toy, Config())


@pytest.mark.parametrize("values", [{}, {"transport": "rdma", "engine": "[::1]:7", "listen": "[::1]:7"}])
def test_options_that_fit(values: dict[str, str]) -> None:
    """The others: tests/plain/project/test_cli.py."""
    for ends in (connectors.ENDS, listeners.ENDS):
        check_end(ends, Config().with_options(values), frozenset(values))


@pytest.mark.parametrize(("ends", "name"), [(connectors.ENDS, "engine"), (listeners.ENDS, "listen")], ids=["front end", "engine"])
def test_rdma_options_are_checked_before_anything_starts(ends: Any, name: str) -> None:
    def check(**values: Any) -> None:
        check_end(ends, Config().with_options(values), frozenset(values))

    with pytest.raises(ConfigError, match=f"--transport rdma needs --{name} HOST:PORT"):
        check(transport="rdma")
    for wrong in ("here", "here:x", ":1"):
        with pytest.raises(ConfigError, match=f"{name} must be HOST:PORT, not '{wrong}'"):
            check(transport="rdma", **{name: wrong})
    for item in dataclasses.fields(RdmaOptions):
        with pytest.raises(ConfigError, match=f"--{item.name.replace('_', '-')} needs --transport rdma"):
            check(**{item.name: item.default})
    check(transport="rdma", **{name: "[::1]:65535"})
    given = RdmaOptions(**{name: "[::1]:65535"})
    assert given.address(name) == ("::1", 65535)
    if name == "engine":
        with pytest.raises(ConfigError, match="--name works only on the engine's machine"):
            check(transport="rdma", engine="localhost:1", name="y")
    else:
        check(transport="rdma", listen="localhost:1", name="y")


def test_an_extension_has_its_defaults_until_it_is_changed() -> None:
    assert Config().extension(RdmaOptions) == RdmaOptions()
    changed = Config().with_options({"rdma_gid_index": 3, "port": 1})
    assert changed.extension(RdmaOptions) == dataclasses.replace(RdmaOptions(), rdma_gid_index=3)
    assert changed.with_options({"rdma_gid_index": -1}) == Config().with_options({"port": 1})


def test_a_front_end_over_rdma_has_an_address_before_all_else() -> None:
    """Whatever else is wrong, too."""
    with pytest.raises(ConfigError, match="needs --engine HOST:PORT"):
        connectors.ENDS["rdma"].check(Config().with_options({"transport": "rdma"}), frozenset({"name"}))
