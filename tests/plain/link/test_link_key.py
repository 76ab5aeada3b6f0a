"""The file with the key of a link, and the cases that need a key."""

import hashlib
import hmac
import os
from pathlib import Path
from typing import Any

import pytest

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.link import connectors
from blinkpy.engine.link import listeners
from blinkpy.transport.contract import check_end
from blinkpy.transport.link_key import FRONT_END, LEAST, MOST, LinkKey, read_link_key
from blinkpy.transport.verbs import RdmaOptions, is_loopback


def key_file(folder: Path, secret: bytes = b"k" * 40, mode: int = 0o600) -> str:
    path = folder / "link.key"
    path.write_bytes(secret)
    path.chmod(mode)
    return str(path)


def test_a_proof_is_the_hmac_of_rfc_2104() -> None:
    expected = hmac.new(b"k" * 40, FRONT_END + b"\0" + b"0f" + b"\0" + b"one\ntwo\n", hashlib.sha256).hexdigest().encode()
    assert LinkKey(b"k" * 40).proof(FRONT_END, b"0f", b"one\n", b"two\n") == expected


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("length", [LEAST, 44, MOST])
def test_a_key_is_what_the_file_holds_but_for_its_last_line_break(tmp_path: Path, end: bytes, length: int) -> None:
    secret = os.urandom(length - 1) + b"x"
    read = read_link_key(key_file(tmp_path, secret + end))
    assert read.proof(FRONT_END, b"") == LinkKey(secret).proof(FRONT_END, b"")


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_files_of_these_modes_hold_a_key(tmp_path: Path, mode: int) -> None:
    read_link_key(key_file(tmp_path, mode=mode))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(({"mode": mode}, "chmod 600") for mode in (0o604, 0o602, 0o601, 0o620, 0o666)),
        ({"secret": b""}, "has 0 bytes, but a key has 32 to 1024; to make one: head -c 32"),
        ({"secret": b"x" * (LEAST - 1) + b"\n"}, "has 31 bytes"),
        ({"secret": b"x" * (MOST + 1)}, "has 1025 bytes"),
        ({"secret": b"x" * (MOST + 1) + b"\n"}, "has 1025 bytes"),
        ({"secret": b"x" * (MOST + 2)}, "has 1026 bytes"),
        ({"secret": b"x" * MOST + b"\n\r\nx"}, "has 1028 bytes"),  # not a key whose end is ignored
        ({"secret": b"x" * 5000}, "has 5000 bytes"),
    ],
)
def test_unsafe_keys_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_link_key(key_file(tmp_path, **changed))


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_link_key(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_link_key(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_link_key(str(tmp_path / "pipe"))


@pytest.mark.parametrize("ends", [listeners.ENDS, connectors.ENDS], ids=["engine", "front end"])
def test_an_address_that_others_reach_needs_a_key_or_a_word(tmp_path: Path, ends: Any) -> None:
    name = "listen" if ends is listeners.ENDS else "engine"

    def check(host: str, **options: Any) -> None:
        values = {"transport": "rdma", name: f"{host}:7700", **options}
        check_end(ends, Config().with_options(values), frozenset(values))

    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        check(host)
    for host in ("10.0.0.1", "0.0.0.0", "[::]", "[fe80::1]", "dpu", "localhost.example"):
        with pytest.raises(ConfigError, match=rf"--{name} .* is reachable from other machines: use --link-key-file FILE"):
            check(host)
        check(host, insecure_link=True)
        check(host, link_key_file=key_file(tmp_path))
    with pytest.raises(ConfigError, match="exclude each other"):
        check("10.0.0.1", insecure_link=True, link_key_file=key_file(tmp_path))
    with pytest.raises(ConfigError, match="can't read the key"):
        check("127.0.0.1", link_key_file="/nowhere/link.key")


def test_shared_memory_needs_no_key() -> None:
    for option in ({"link_key_file": "x"}, {"insecure_link": True}):
        with pytest.raises(ConfigError, match="needs --transport rdma"):
            check_end(listeners.ENDS, Config().with_options(option), frozenset(option))


def test_a_key_is_read_where_one_is_named(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    assert RdmaOptions(listen="127.0.0.1:0").link_key("listen") is None
    assert isinstance(RdmaOptions(listen="127.0.0.1:0", link_key_file=path).link_key("listen"), LinkKey)
    assert not is_loopback("")
