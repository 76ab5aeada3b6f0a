"""Keys: the contents of the file, the owner of a request, its hits in the cache, and SIGHUP.

Claim front-ends/keys: A key finds no data of another key in the prefix cache. No client
chooses its tenant. A request has a class that its key may use.
"""

import contextlib
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.commands import Command
from support.front_end.fake_engine import SIZES, FakeEngine
from support.front_end.http_server import serving
from support.front_end.tenants import SECRET, bearer, write_keys
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.keys_file import KEYS_OF_ONE, MOST_BYTES, MOST_TENANTS, KeyRing, TenantTable, keys_of, read_keys
from blinkpy.dpu.admission.tenant import ANONYMOUS, Tenant
from blinkpy.dpu.http.answers import Choice, Usage, at_once
from blinkpy.dpu.http.message_answer import MessageAnswer
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.queues.request_parameters import INT32_RANGE
from blinkpy.serving.frontend_process import check_access

URL = re.compile(r"http://127\.0\.0\.1:(\d+)")
PATIENCE_S = 200.0  # for processes on a busy machine
SECRET_WORD = "sk-4hzt0p"  # no message may have it


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


# ---- the file ------------------------------------------------------------------------------------------------------------


def read(path: Path, text: str, api_key: str = "") -> KeyRing:
    path.write_text(text)
    return read_keys(str(path), api_key, False, SECRET)


def test_every_field_is_read(tmp_path: Path) -> None:
    text = f"""
        [research]
        key = ["first", "second"]
        sha256 = "{digest("third").upper()}"
        number = 7
        weight = 2
        requests = 64
        waiting_tokens = 0
        tokens_per_minute = 100_000
        priorities = [-1, 5]
        service_tier = "flex"
        service_tiers = ["flex"]
        share_prefixes = true

        [other]
        key = "fourth"
    """
    ring = read(tmp_path / "k", text)
    research = Tenant("research", 7, 2.0, 64, 0, 100_000, (-1, 5), True, "flex", ("flex",))
    assert [ring.find(key) for key in (b"first", b"second", b"third", b"", b"firs", b"first ")] == [research] * 3 + [None] * 3
    other = ring.find(b"fourth")
    assert other is not None
    assert (other.requests, other.waiting_tokens, other.tokens_per_minute, other.priorities) == (None, None, None, None)
    assert (other.service_tier, other.service_tiers) == ("priority", ("priority", "flex"))
    assert other.salt
    assert 1 <= other.number <= INT32_RANGE[1]
    assert set(TenantTable.__struct_fields__) == set(re.findall(r"^ +(\w+) =", text, re.M))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have 1 to 500 tenants, not 0"),
        ("[a]", r"k: a: needs 1 to 8 keys"),
        (f'"{SECRET_WORD}" = "a"', "k: entry 1 is not a table"),
        (f'[a]\nkey = "x"\n{SECRET_WORD} = "a"', "k: a: unknown field; known fields: key, sha256"),
        ('[a]\nkey = "x"\nweigth = 2', "did you mean 'weight'"),
        (f'[a]\nkey = "{SECRET_WORD} x"', "k: a: key must be 1 to 512 visible ASCII"),
        ('[a]\nkey = ""', "k: a: key must be"),
        ("[a]\nkey = 5", "k: a: key must be"),
        ("[a]\nkey = []", "k: a: needs 1 to 8 keys"),
        (f'[a]\nsha256 = "{SECRET_WORD}"', "k: a: sha256 must be"),
        (f"[a]\nkey = {[str(i) for i in range(KEYS_OF_ONE + 1)]}", "k: a: needs 1 to 8 keys"),
        (f'[a]\nkey = "{SECRET_WORD}"\nsha256 = "{digest(SECRET_WORD)}"', "k: a: lists a key twice"),
        (f'[a]\nkey = "{SECRET_WORD}"\n[b]\nkey = "{SECRET_WORD}"', "k: b: shares a key with a"),
        ('[a]\nkey = "x"\nnumber = 4\n[b]\nkey = "y"\nnumber = 4', "k: b: has the number 4 of a"),
        ('["a b"]\nkey = "x"', "name of tenant 1 must be"),
        (f'["{"n" * 65}"]\nkey = "x"', "name of tenant 1 must be"),
        *((f'[a]\nkey = "x"\nweight = {value}', "a: weight must be a number") for value in ("0", "1001", "true", '"1"', "nan")),
        *((f'[a]\nkey = "x"\nrequests = {value}', "a: requests must be an integer, 1 to") for value in ("0", "1.5", "true")),
        ('[a]\nkey = "x"\nwaiting_tokens = -1', "a: waiting_tokens must be an integer, 0 to"),
        ('[a]\nkey = "x"\ntokens_per_minute = 0', "a: tokens_per_minute must be an integer, 1 to"),
        ('[a]\nkey = "x"\nnumber = 0', "a: number must be an integer, 1 to"),
        *(
            (f'[a]\nkey = "x"\npriorities = {v}', "a: priorities must be")
            for v in ("[1]", "[2, 1]", "5", "[0, 2147483648]", "[0, true]")
        ),
        *(
            (f'[a]\nkey = "x"\nservice_tier = {v}', "a: service_tier must be one of priority, flex")
            for v in ('"auto"', '"default"', "1", '["flex"]', '""')
        ),
        *(
            (f'[a]\nkey = "x"\nservice_tiers = {v}', "a: service_tiers must be a list of one or several of priority, flex")
            for v in ("[]", '"flex"', '["flex", "scale"]', "[1]", '[["flex"]]')
        ),
        (
            '[a]\nkey = "x"\nservice_tier = "priority"\nservice_tiers = ["flex"]',
            "a: service_tier must be one of service_tiers",
        ),
        ('[a]\nkey = "x"\nshare_prefixes = 1', "a: share_prefixes must be true or false"),
        (f'[a]\nkey = "{SECRET_WORD}', r"k is not TOML \(at "),
        ('[a]\nkey = "x"\n[a]\nkey = "y"', r"k is not TOML \(at line 3"),
        ("#" * (MOST_BYTES + 1), "is larger than"),
        ("\n".join(f'[t{i}]\nkey = "{i}"' for i in range(MOST_TENANTS + 1)), "tenants, not 501"),
        ('[a]\nkey = "the-one"', "k: a: shares its key with --api-key"),
        ('[default]\nkey = "x"', "k: default: rename this tenant: --api-key uses the name"),
    ],
)
def test_errors_of_a_key_file_name_file_tenant_and_reason_but_no_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path / "k", text, "the-one")
    assert SECRET_WORD not in str(caught.value)
    assert digest(SECRET_WORD) not in str(caught.value)


def test_tenants_share_prefixes_as_configured(tmp_path: Path) -> None:
    """By the option, unless the file sets another value; --api-key has a separate part, next to other keys."""
    path = write_keys(tmp_path / "k", silent={}, shares={"share_prefixes": True}, alone={"share_prefixes": False})
    for option, sharing in ((False, {"shares"}), (True, {"silent", "shares", "default"})):
        tenants = read_keys(str(path), "one", option, SECRET).tenants
        assert set(tenants) == {"silent", "shares", "alone", "default"}
        assert {name for name, tenant in tenants.items() if not tenant.salt} == sharing
    assert not read_keys("", "one", False, SECRET).tenants["default"].salt


def test_files_that_are_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"\xff\xfe")
    for path, message in ((tmp_path / "k", "not UTF-8"), (tmp_path / "none", "can't read"), (tmp_path, "can't read")):
        with pytest.raises(ConfigError, match=message):
            read_keys(str(path), "")


def test_all_keys_of_a_large_file_are_found_and_no_other(tmp_path: Path, rng: np.random.Generator) -> None:
    keys = {f"t{i}": rng.bytes(12).hex() for i in range(MOST_TENANTS)}
    ring = read(tmp_path / "k", "\n".join(f'[{name}]\nkey = "{key}"' for name, key in keys.items()))
    found = {name: ring.find(key.encode()) for name, key in keys.items()}
    assert all(tenant is not None and tenant.name == name for name, tenant in found.items())
    assert (
        len({tenant.number for tenant in found.values() if tenant}) == len({t.salt for t in found.values() if t}) == MOST_TENANTS
    )
    assert all(ring.find(key[:-1].encode()) is None for key in keys.values())


def test_faults_end_the_start_at_once(tmp_path: Path) -> None:
    config = Config().with_options({"api_keys": str(tmp_path / "none"), "port": 0})
    with pytest.raises(ConfigError, match=r"can't read .*none"):
        check_access(config)
    assert config.extension(AdmissionOptions).max_waiting_s == 60
    for name, value in (("max_waiting_s", 0), ("max_waiting_tokens", -1)):
        with pytest.raises(ConfigError, match=name):
            Config().with_options({name: value})


def test_one_key_is_what_a_header_can_bring() -> None:
    """Another value would admit no client: that of a file with a line end, for example, from an environment
    variable."""
    for key in ("k", "a b", "x" * 600, "!~", "sécret"):
        assert read_keys("", key).find(key.encode()) is not None
    for key in ("k\n", " k", "k ", "a\tb", "a\0", "\x7f", "a\udcff", " "):
        with pytest.raises(ConfigError, match="api_key must fit into a header"):
            read_keys("", key)


def test_priorities_that_a_key_may_send() -> None:
    for priorities, asked, settled in (
        (None, 0, 0), (None, 1, None), (None, -1, None), (INT32_RANGE, -(2**31), -(2**31)),
        ((0, 5), 5, 5), ((0, 5), 6, None), ((0, 5), -1, None), ((2, 5), 0, 2), ((2, 5), 1, None), ((-5, -2), 0, -2),
    ):  # fmt: skip
        assert Tenant("a", priorities=priorities).settle_priority(asked) == settled


def test_the_service_tier_that_a_key_gets(tmp_path: Path) -> None:
    """The requested class if permitted, and the default of the key without a request."""
    fields: dict[str, dict[str, object]] = {
        "free": {}, "barred": {"service_tiers": ["flex"]}, "urgent": {"service_tiers": ["priority"]},
        "batch": {"service_tier": "flex"}, "both": {"service_tiers": ["flex", "priority"]},
    }  # fmt: skip
    ring = read_keys(str(write_keys(tmp_path / "k", **fields)), "", False, SECRET)
    asked = (None, "auto", "default", "priority", "flex")
    settled = {name: [ring.tenants[name].settle_tier(one) for one in asked] for name in fields}
    assert settled["free"] == settled["both"] == ["priority"] * 4 + ["flex"]
    assert settled["barred"] == ["flex"] * 3 + [None, "flex"]
    assert settled["urgent"] == ["priority"] * 4 + [None]
    assert settled["batch"] == ["flex"] * 3 + ["priority", "flex"]
    assert [ANONYMOUS.settle_tier(one) for one in asked] == settled["free"]


def test_salts_are_apart_and_stable() -> None:
    """Of tenants, of servers, and of a client's salt; the same in each worker of a server, and after each start
    of one."""

    def salts(secret: bytes, *names: str) -> list[int]:
        tenants = [Tenant(name, salt=hashlib.sha256(secret + name.encode()).digest()) for name in names]
        return [tenant.cache_salt(own) for tenant in tenants for own in (0, 1, 2**63 - 1)]

    first = salts(b"1", "a", "b")
    assert first == salts(b"1", "a", "b")
    assert len(set(first + salts(b"2", "a", "b"))) == 12
    assert all(0 < salt < 2**63 for salt in first)
    assert [ANONYMOUS.cache_salt(own) for own in (0, 5)] == [0, 5]


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


def post(url: str, headers: dict[str, str], **fields: object) -> httpx.Response:
    body = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_request_belongs_to_its_key(folder, tmp_path) -> None:
    """The engine's view: the tenant's number, the permitted priority, and page hashes that no other tenant has."""
    path = write_keys(
        tmp_path / "k",
        plain={},
        fast={"priorities": [-5, 5], "number": 9, "weight": 2.5},
        open={"share_prefixes": True},
        free={"share_prefixes": True},
    )
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(path)) as server:
        numbers = {name: tenant.number for name, tenant in server.server.app.service.admission.tenants.items()}

        def seen(name: str, **fields: object) -> tuple[int, int, list[int]]:
            assert post(server.url, bearer(name), **fields).status_code == 200
            request = engine.submitted[-1]
            return int(request.entry["tenant"]), int(request.entry["priority"]), request.hashes

        assert seen("plain")[:2] == (numbers["plain"], 0)
        assert int(engine.submitted[-1].entry["tenant_weight"]) == 100
        assert seen("fast", priority=-5)[:2] == (9, -5)
        assert int(engine.submitted[-1].entry["tenant_weight"]) == 250, "hundredths"
        for name, priority in (("plain", 1), ("fast", 6), ("fast", -6)):
            answer = post(server.url, bearer(name), priority=priority)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (403, "priority_not_allowed", "priority")
            assert error["type"] == "permission_error"
        assert post(server.url, bearer("plain"), tenant=3).json()["error"]["param"] == "tenant", "no client chooses it"
        assert seen("plain")[2] == seen("plain")[2]
        own = [tuple(seen(name, **salt)[2]) for name in ("plain", "fast", "open") for salt in ({}, {"cache_salt": "x"})]
        assert len(set(own)) == 6
        assert seen("open")[2] == seen("free")[2]
        assert seen("open", cache_salt="x")[2] == seen("free", cache_salt="x")[2]
        for headers in ({}, bearer("nobody"), {"authorization": "Basic key-of-plain"}, {"authorization": "Bearer"}):
            answer = post(server.url, headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.client.get("/metrics").text.count('tenant="plain"') > 0


def test_a_request_has_a_class(folder, tmp_path) -> None:
    """In its entry, and in each form of its answer; a tier that the key may not send causes a 403, an unknown
    one a 400."""
    path = write_keys(tmp_path / "k", free={}, batch={"service_tier": "flex"}, barred={"service_tiers": ["flex"]})
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(path)) as server:

        def seen(name: str, **fields: object) -> tuple[int, set[str]]:
            """The class that the engine sees, and the tiers that the answers name: of a completion, a chat and a response,
            whole and streamed."""
            chat = {"messages": [{"role": "user", "content": "a"}]}
            bodies = {"completions": {"prompt": [7, 8]}, "chat/completions": chat, "responses": {"input": "a"}}
            found, classes = set[str](), set[int]()
            for kind, body in bodies.items():
                for stream in (False, True):
                    more = {"max_output_tokens" if kind == "responses" else "max_tokens": 2, "stream": stream, **fields}
                    answer = httpx.post(f"{server.url}/v1/{kind}", json=body | more, headers=bearer(name), timeout=60)
                    assert answer.status_code == 200, answer.text
                    named = set(re.findall(r'"service_tier": ?"(\w+)"', answer.text))
                    assert len(named) == 1, answer.text
                    found |= named
                    classes.add(int(engine.submitted[-1].entry["best_effort"]))
            (only,) = classes
            return only, found

        for name, fields, kind in (
            ("free", {}, 0), ("free", {"service_tier": "auto"}, 0), ("free", {"service_tier": "flex"}, 1),
            ("batch", {}, 1), ("batch", {"service_tier": "default"}, 1), ("batch", {"service_tier": "priority"}, 0),
            ("barred", {"service_tier": None}, 1), ("free", {"service_tier": "priority"}, 0),
        ):  # fmt: skip
            shown = "flex" if kind else "priority" if fields.get("service_tier") == "priority" else "default"
            assert seen(name, **fields) == (kind, {shown}), (name, fields)
        before = len(engine.submitted)
        for tier, status, code in (("priority", 403, "service_tier_not_allowed"), ("scale", 400, "invalid_value")):
            answer = post(server.url, bearer("barred"), service_tier=tier)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, "service_tier")
        assert post(server.url, bearer("free"), best_effort=1).json()["error"]["param"] == "best_effort", "it has one name"
        assert len(engine.submitted) == before
    parsed = MessageAnswer("m", lambda token: ("", b""), Expected(), True, None, "flex")
    for body in (parsed.event(0, "a"), at_once(parsed.whole([Choice(0, "a", "stop")], Usage(1, 1)))):
        assert b'"service_tier":"flex"' in body


def test_one_key_works_as_before(folder, monkeypatch) -> None:
    monkeypatch.setenv("BLINKPY_API_KEY", "from the environment")
    with FakeEngine() as engine, serving(engine, folder) as server:
        assert post(server.url, {"authorization": "Bearer from the environment"}, priority=4).status_code == 200
        assert int(engine.submitted[0].entry["tenant"]) > 0
        assert int(engine.submitted[0].entry["cache_salt"]) == 0, "there is nobody to guess at"
        assert post(server.url, {}).status_code == 401
    monkeypatch.delenv("BLINKPY_API_KEY")
    with FakeEngine() as engine, serving(engine, folder) as server:
        assert post(server.url, bearer("anybody"), priority=4).status_code == 200
        assert int(engine.submitted[0].entry["tenant"]) == 0
        assert "blinkpy_tenant" not in server.client.get("/metrics").text


def test_workers_of_a_server_have_one_salt_for_a_tenant(tmp_path) -> None:
    path = str(write_keys(tmp_path / "k", a={}))
    config = Config().with_options({"api_keys": path})
    rings = [keys_of(config, secret).read() for secret in (SECRET, SECRET, b"another")]
    salts = [ring.tenants["a"].cache_salt(0) for ring in rings if ring is not None]
    assert salts[0] == salts[1] != salts[2]


# ---- SIGHUP, with real processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def front_end(engine: FakeEngine, folder: Path, *more: str) -> Iterator[tuple[Command, str]]:
    """`blinkpy frontend`, and its address."""
    patient = ("--engine-timeout-ms", str(int(PATIENCE_S * 1000)))
    command = Command("frontend", "--name", engine.segment_name, "--model", str(folder), "--port", "0", *patient, *more)
    try:
        yield command, f"http://127.0.0.1:{command.find(URL)[1]}"
    finally:
        command.kill()


def workers_of(command: Command) -> list[int]:
    children = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def test_sighup_reloads_valid_keys_in_each_worker(folder, tmp_path) -> None:
    path = write_keys(tmp_path / "k", old={}, kept={})
    options = ("--workers", "2", "--api-keys", str(path))
    with FakeEngine(sizes=replace(SIZES, pairs=2)) as engine, front_end(engine, folder, *options) as (command, url):
        wait_for(lambda: all(pair.attached for pair in engine.pairs), PATIENCE_S)
        workers = workers_of(command)

        def statuses(name: str) -> set[int]:
            """Of many connections, which the kernel spreads over the workers."""
            return {post(url, bearer(name)).status_code for _ in range(6)}

        def reload(said: str) -> None:
            """Signal, and wait until both workers have said something."""
            command.process.send_signal(signal.SIGHUP)
            wait_for(lambda: sum(said in line for line in list(command.said)) == 2, PATIENCE_S, lambda: str(command.said))

        def served_by_both() -> bool:
            statuses("kept")
            return {request.pair for request in engine.submitted} == {0, 1}

        wait_for(served_by_both, PATIENCE_S)
        assert (statuses("old"), statuses("new")) == ({200}, {401})
        assert len({int(request.entry["cache_salt"]) for request in engine.submitted}) == 2, "one of each tenant, in both workers"
        path.write_text("[kept]\nweigth = 3\n")
        reload("keeping the previous keys")
        assert any("did you mean 'weight'" in line for line in command.said)
        assert (statuses("old"), statuses("kept")) == ({200}, {200})
        write_keys(path, kept={}, new={})
        with ThreadPoolExecutor(1) as pool:
            engine.hold, before = True, len(engine.submitted)
            running = pool.submit(post, url, bearer("old"))
            wait_for(lambda: len(engine.submitted) > before, PATIENCE_S)
            reload(": 2 tenants")
            assert statuses("old") == {401}
            engine.hold = False
            assert running.result().status_code == 200
        assert (statuses("kept"), statuses("new")) == ({200}, {200})
        assert workers_of(command) == workers
        os.kill(workers[0], signal.SIGKILL)
        epoch = engine.pairs[0].epoch + engine.pairs[1].epoch

        def is_back() -> bool:
            command.send(signal.SIGHUP)
            time.sleep(0.05)
            return engine.pairs[0].epoch + engine.pairs[1].epoch > epoch

        wait_for(is_back, PATIENCE_S)
        assert statuses("new") == {200}
        ended = [line for line in command.said if "SIGHUP" in line and "keeping the previous keys" not in line]
        assert ended == [], "its successor was not ended while it started"
        assert "key-of" not in "".join(command.said)
        assert command.end() == 0
