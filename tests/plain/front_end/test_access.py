"""Access to the server: other origins, HTTPS, Unix sockets, paths behind a proxy; checked before a model is
loaded."""

import contextlib
import re
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.front_end.fake_engine import SIZES, FakeEngine
from support.front_end.http_server import MODEL, events, serving
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.admission.gate import HANDSHAKES, KNOWN, STRANGERS
from blinkpy.dpu.descriptors import BACKLOG, PATH_BYTES, check_unix, listen_unix
from blinkpy.dpu.supervisor import Supervisor
from blinkpy.serving.frontend_process import check_access, print_ready

HERE, ELSEWHERE = "https://here.example", "https://elsewhere.example"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-a"}
BODY = {"prompt": [7, 8], "max_tokens": 4}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    """Files with a certificate for 127.0.0.1 that signs itself, and with its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = [str(folder / name) for name in ("cert.pem", "key.pem")]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    subprocess.run([*request, "-addext", "subjectAltName=IP:127.0.0.1", "-out", names[0], "-keyout", names[1]], check=True)
    return names[0], names[1]


# ---- other origins


def cross(headers: httpx.Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control")}


def test_by_default_no_other_origin_reads_anything(engine, folder) -> None:
    with serving(engine, folder) as server:
        ask = {"origin": HERE, "access-control-request-method": "POST"}
        assert server.client.options("/v1/completions", headers=ask).status_code == 405
        answer = server.client.post("/v1/completions", json=BODY, headers={"origin": HERE})
        assert answer.status_code == 200
        assert cross(answer.headers) == {}


@pytest.mark.parametrize(("allowed", "granted"), [(HERE, {HERE}), (f'["{HERE}"]', {HERE}), ("*", {HERE, ELSEWHERE})])
def test_allowed_origins_read_answers_and_errors(engine, folder, allowed, granted) -> None:
    with serving(engine, folder, allowed_origins=allowed, api_key="secret") as server:
        for origin in (HERE, ELSEWHERE, "null", HERE + ".evil"):
            ask = {"origin": origin, **ASKED}
            before = server.client.options("/v1/completions", headers=ask)
            plain = server.client.post("/v1/completions", json=BODY, headers={"origin": origin})
            assert plain.status_code == 401
            assert "origin" in plain.headers["vary"].lower()
            if origin in granted or allowed == "*":
                assert before.status_code == 200
                found = cross(before.headers)
                assert found["access-control-allow-origin"] == origin
                assert found["access-control-allow-methods"] == "POST"
                assert found["access-control-allow-headers"] == "authorization, x-a"
                assert cross(plain.headers)["access-control-allow-origin"] == origin
            else:
                assert before.status_code == 401
                assert cross(before.headers) == cross(plain.headers) == {}
        assert cross(server.client.get("/health").headers) == {}, "no origin asked"
        streamed = server.client.post(
            "/v1/completions", json={**BODY, "stream": True}, headers={"origin": HERE, "authorization": "Bearer secret"}
        )
        assert events(streamed)
        assert streamed.headers["access-control-expose-headers"].startswith("x-request-id")


def test_methods_headers_and_credentials_by_name(engine, folder) -> None:
    options = {
        "allowed_origins": HERE,
        "allowed_methods": "GET,POST",
        "allowed_headers": "content-type",
        "allow_credentials": True,
    }
    with serving(engine, folder, **options) as server:
        ask = {"origin": HERE, "access-control-request-method": "DELETE", "access-control-request-headers": "x-a"}
        found = cross(server.client.options("/v1/models", headers=ask).headers)
    assert found["access-control-allow-methods"] == "GET, POST"
    assert found["access-control-allow-headers"] == "content-type"
    assert found["access-control-allow-credentials"] == "true"


# ---- a path behind a proxy


def test_a_path_behind_a_proxy(engine, folder) -> None:
    with serving(engine, folder, root_path="/llm/a") as server:
        for prefix in ("", "/llm/a"):  # a proxy takes the prefix off, or does not
            assert server.client.get(f"{prefix}/health").status_code == 200
            assert server.client.post(f"{prefix}/v1/completions", json=BODY).status_code == 200
            assert "<title>blinkpy" in server.client.get(f"{prefix}/").text
        moved = server.client.get("/llm/a")
        assert (moved.status_code, moved.headers["location"]) == (307, "/llm/a/")
        assert server.client.get("/llm/ab/health").status_code == 404
        assert server.client.get("/llm/a/openapi.json").json()["servers"] == [{"url": "/llm/a"}]


def test_a_key_protects_what_is_below_a_path_too(engine, folder) -> None:
    with serving(engine, folder, root_path="/llm", api_key="secret") as server:
        assert server.client.post("/llm/v1/completions", json=BODY).status_code == 401
        assert server.client.get("/llm/v1/models").status_code == 401


# ---- the page


def test_the_page_loads_no_external_resource_and_can_be_disabled(engine, folder) -> None:
    with serving(engine, folder, api_key="secret") as server:
        answer = server.client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; connect-src 'self';")
        assert "unsafe" not in policy
        assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", answer.text)
        assert len(answer.content) < 50_000
        assert "@style@" not in answer.text and "@script@" not in answer.text
        assert server.client.post("/", json={}).status_code == 405
    with serving(engine, folder, page=False) as server:
        assert server.client.get("/").status_code == 404


# ---- HTTPS and Unix sockets


def test_https_with_streams(engine, folder, certificate) -> None:
    cert, key = certificate
    with serving(engine, folder, ssl_certfile=cert, ssl_keyfile=key) as server:
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=ssl.create_default_context(cafile=cert)) as client:
            whole = client.post("/v1/completions", json={**BODY, "max_tokens": 40}).json()["choices"][0]["text"]
            streamed = events(client.post("/v1/completions", json={**BODY, "max_tokens": 40, "stream": True}))
            assert "".join(event["choices"][0]["text"] for event in streamed) == whole
        assert not server.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200"), "plain HTTP"


def test_silent_tls_handshakes_count_as_connections_and_block_no_client(engine, folder, certificate) -> None:
    """They count from accept: the connection that has waited longest is closed, and idle connections have a
    deadline."""
    cert, key = certificate
    options = {"ssl_certfile": cert, "ssl_keyfile": key, "max_connections": 20, "header_timeout_s": 2}
    with serving(engine, folder, **options) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(60)]
        begun = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        begun.sendall(b"\x16\x03\x01\x02\x00\x01")  # of a handshake
        open_now = server.server.connections.open
        wait_for(lambda: 0 < len(open_now) <= 20)
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
        wait_for(lambda: len(open_now) == 0)
        for sock in (*silent, begun):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1000)[:1] in (b"", b"\x15"), "closed, or an alert"


def test_new_connections_are_charged_to_the_tenant_at_their_address_or_to_handshakes(
    engine, folder, certificate, monkeypatch
) -> None:
    """Of strangers, the first message of a handshake is HANDSHAKES' work. A tenant's are KNOWN's until the first headers."""
    cert, key = certificate
    with serving(engine, folder, ssl_certfile=cert, ssl_keyfile=key, api_key="secret") as server:
        groups, context = list[str](), ssl.create_default_context(cafile=cert)
        gate = server.server.app.service.gate
        ask = gate.ask
        monkeypatch.setattr(gate, "ask", lambda asker, *a, **b: (groups.append(asker.group), ask(asker, *a, **b))[1])

        def connect(address: str) -> ssl.SSLSocket:
            sock = socket.create_connection(("127.0.0.1", server.port), source_address=(address, 0))
            return context.wrap_socket(sock, server_hostname="127.0.0.1")

        def models(sock: ssl.SSLSocket, given: str) -> bytes:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % given.encode())
            return sock.recv(12)

        def handshaking() -> list[bool]:
            return [one.transport.handshaking for one in server.server.connections.open]

        with socket.create_connection(("127.0.0.1", server.port)):
            wait_for(lambda: handshaking() == [True])
        wait_for(lambda: not handshaking())
        with connect("127.0.0.1") as known:
            assert groups.count(HANDSHAKES) == 1
            assert models(known, "wrong") == b"HTTP/1.1 401"
            assert groups.count(HANDSHAKES) == 1 and STRANGERS in groups
            connect("127.0.0.1").close()
            assert groups.count(HANDSHAKES) == 2
            assert models(known, "secret") != b""
            wait_for(lambda: handshaking() == [False])
            wait_for(lambda: server.server.connections._admitted)
            groups.clear()
            with connect("127.0.0.1") as new:
                wait_for(lambda: server.server.connections.begun)
                wait_for(lambda: groups.count(KNOWN) >= 2)
                assert set(groups) <= {KNOWN, ""}
                assert models(new, "wrong") == b"HTTP/1.1 401"
                assert STRANGERS in groups and not server.server.connections.begun
            groups.clear()
            connect("127.0.0.2").close()
            assert groups.count(HANDSHAKES) == 1 and KNOWN not in groups
        wait_for(lambda: not server.server.connections._admitted)


def test_without_tls_new_connections_are_work_of_their_address(engine, folder, monkeypatch) -> None:
    """Which is done in order, also at the addresses of a tenant's requests."""
    with serving(engine, folder, api_key="secret") as server, contextlib.ExitStack() as stack:
        groups, gate = list[str](), server.server.app.service.gate
        ask = gate.ask
        monkeypatch.setattr(gate, "ask", lambda asker, *a, **b: (groups.append(asker.group), ask(asker, *a, **b))[1])
        assert server.client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert server.server.connections._admitted and STRANGERS in groups
        groups.clear()
        for _ in range(3):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
        assert STRANGERS in groups and not {HANDSHAKES, KNOWN} & set(groups)
        assert not any(one.transport.handshaking for one in server.server.connections.open)


def test_https_that_asks_for_clients_certificates(engine, folder, certificate) -> None:
    cert, key = certificate
    options = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert, "ssl_cert_reqs": 2}
    with serving(engine, folder, **options) as server:
        context = ssl.create_default_context(cafile=cert)
        url = f"https://127.0.0.1:{server.port}/health"
        with httpx.Client(verify=context) as client, pytest.raises(httpx.TransportError):
            client.get(url)
        context.load_cert_chain(cert, key)
        with httpx.Client(verify=context) as client:
            assert client.get(url).status_code == 200


def test_workers_share_a_unix_socket(folder, tmp_path) -> None:
    path = str(tmp_path / "llm.sock")
    for left in (False, True):  # the second time after a server that was killed
        with FakeEngine(sizes=replace(SIZES, pairs=2)) as engine:
            options = {
                "name": engine.segment_name,
                "served_model_name": MODEL,
                "workers": 2,
                "shutdown_s": 1,
                "log_level": "error",
            }
            if left:
                with socket.socket(socket.AF_UNIX) as old:
                    old.bind(path)
            served(Config().with_options({**options, "uds": path}), folder, path)
        assert not Path(path).exists()


def served(config: Config, folder: Path, path: str) -> None:
    """Run a supervisor, and check that it answers at a Unix socket."""
    answers: list[int] = []

    def ready(host: str, port: int) -> None:
        assert (host, port) == (path, 0)
        with pytest.raises(ConfigError, match="another process already listens"):
            check_unix(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=20) as client:
            answers.append(client.get("/health").status_code)
            answers.append(client.post("/v1/completions", json=BODY).status_code)
        supervisor.stop()

    supervisor = Supervisor(config, folder, ready)
    assert supervisor.run() == 0
    assert answers == [200, 200]


# ---- checks before anything is loaded


def test_sockets_that_cannot_be(tmp_path) -> None:
    (tmp_path / "file").touch()
    with listen_unix(str(tmp_path / "used"), 1, BACKLOG)[0]:
        for name, reason in (
            ("used", "another process already listens"),
            ("file", "is not a socket"),
            ("missing/x", "can't write"),
            ("x" * PATH_BYTES, "at most 107 bytes"),
        ):
            with pytest.raises(ConfigError, match=reason):
                check_access(Config().with_options({"uds": str(tmp_path / name)}))
    assert (tmp_path / "file").exists()


def test_certificates_that_cannot_be_used(certificate, tmp_path) -> None:
    cert, key = certificate
    other = tmp_path / "other.pem"
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(other), "2048"], check=True, capture_output=True)
    subprocess.run(
        ["openssl", "rsa", "-aes128", "-passout", "pass:abcd", "-in", key, "-out", str(locked)], check=True, capture_output=True
    )
    (tmp_path / "text").write_text("no certificate\n")
    check_access(Config().with_options({"ssl_certfile": cert, "ssl_keyfile": key, "port": 0}))
    for options, named in (
        ({"ssl_certfile": str(tmp_path / "none"), "ssl_keyfile": key}, "ssl_certfile .*No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(other)}, "ssl_certfile .*"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(locked)}, "ssl_certfile .*"),
        ({"ssl_certfile": cert}, "ssl_certfile .*"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "text")}, "ssl_ca_certs .*"),
    ):
        with pytest.raises(ConfigError, match=f"^{named} can't be used|^{named}") as caught:
            check_access(Config().with_options({"port": 0, **options}))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ssl_keyfile": "x"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "x"}, "ssl_cert_reqs needs ssl_ca_certs"),
        ({"root_path": "llm"}, "root_path must be a path"),
        ({"root_path": "/llm/"}, "root_path must be a path"),
        ({"root_path": "/a b"}, "root_path must be a path"),
        (
            {"allowed_origins": "here.example"},
            "allowed_origins: 'here.example' is not an origin such as https://example.org, without a path",
        ),
        (
            {"allowed_origins": "https://here.example/"},
            "allowed_origins: 'https://here.example/' is not an origin such as https://example.org",
        ),
        ({"allowed_origins": "[1]"}, "allowed_origins must be a list of strings"),
        ({"allowed_origins": '["a'}, "allowed_origins is not a JSON list"),
        ({"allowed_methods": "get\r\nx: y"}, "allowed_methods: .* is not a method in upper case"),
        ({"allowed_headers": "a b"}, "allowed_headers: 'a b' is not the name of a header"),
        ({"allowed_origins": "*", "allow_credentials": True}, "needs allowed_origins by name"),
        ({"otlp_traces_endpoint": "localhost:4318"}, "must begin with http"),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
        ({"metrics_names": "other"}, "metrics_names must be one of"),
    ],
)
def test_options_that_do_not_fit(options, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        Config().with_options(options)


def test_traces_without_their_packages_are_refused_at_once(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr("blinkpy.packages.installed", lambda name: not name.startswith("opentelemetry"))
    with pytest.raises(ConfigError, match=r"pip install 'blinkpy-serve\[otel\]'"):
        check_access(Config().with_options({"otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces", "port": 0}))


@pytest.mark.parametrize(
    ("text", "words"), [(None, "can't read the chat template"), ("{% if %}", "the chat template is not valid")]
)
def test_chat_templates_are_checked_before_anything_is_loaded(text: str | None, words: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    if text is not None:
        template.write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_access(Config().with_options({"chat_template": str(template), "port": 0}))
    template.write_text("{{ messages[0].content }}")
    check_access(Config().with_options({"chat_template": str(template), "port": 0}))


def test_the_printed_curl_command_reaches_the_server(capsys) -> None:
    print_ready(Config().with_options({"uds": "/run/a b.sock"}), 0)
    assert "curl -N --unix-socket '/run/a b.sock' http://localhost/v1" in capsys.readouterr().out
    print_ready(Config().with_options({"ssl_certfile": "cert.pem"}), 8443)
    assert "curl -N --insecure https://127.0.0.1:8443/v1" in capsys.readouterr().out
