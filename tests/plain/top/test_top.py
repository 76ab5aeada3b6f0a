"""`blinkpy top` next to servers that come and go, in a pipe and in a terminal."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from rich.console import Console
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import serving
from support.front_end.tiny_tokenizer import write_model

from blinkpy.config import ConfigError
from blinkpy.queues import words as W
from blinkpy.tool_options import TopOptions
from blinkpy.top.server_sample import ServerSample, look, parse_metrics
from blinkpy.top.top_table import tenant_table, top_table, top_tables

COMMAND = [sys.executable, "-m", "blinkpy", "top"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_one_table_in_a_pipe(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder) as server:
        engine.views.engine[W.GAUGE["requests_running"]] = 17
        engine.views.engine[W.GAUGE["pages_held"]] = 3
        engine.views.engine[W.GAUGE["pages_free"]] = 9
        server.complete([7, 8], max_tokens=9)
        gone = "127.0.0.1:1"
        done = subprocess.run(
            [*COMMAND, f"127.0.0.1:{server.port}", "--interval", "0.2"], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        head, row = done.stdout.splitlines()
        values = dict(zip(re.split(r"  +", head.strip()), re.split(r"  +", row.strip()), strict=True))
        expected = {
            "server": f"127.0.0.1:{server.port}",
            "state": "ready",
            "run": "17",
            "KV held": "25 %",
            "slots": "0/8",
            "W": "-",
        }
        assert expected.items() <= values.items()
        both = [*COMMAND, "--once", "--interval", "0.2", server.url, gone]
        done = subprocess.run(both, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, "")
        assert re.search(rf"^{gone} +gone: Connection refused", done.stdout, re.M)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command in a separate terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    with subprocess.Popen([*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            yield process, ours
            assert process.wait(60) == 0
            assert termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON) == termios.ECHO | termios.ICANON
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


def read_until(ours: int, text: str, timeout_s: float = 30) -> str:
    """The terminal's output until a text is there. Raises AssertionError when it does not come."""
    seen, deadline = "", time.monotonic() + timeout_s
    while text not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([ours], [], [], left)[0], f"no {text!r} in {seen!r}"
        seen += os.read(ours, 65536).decode(errors="replace")
    return seen


@pytest.mark.parametrize("leave", ["q", "interrupt"])
def test_in_a_terminal_until_somebody_leaves(folder, leave) -> None:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine())
        server = stack.enter_context(serving(engine, folder))
        with terminal(server.url, "--interval", "0.2") as (process, ours):
            read_until(ours, "ready")
            stack.close()
            read_until(ours, "gone: Connection refused")
            if leave == "q":
                os.write(ours, b"q")
            else:
                process.send_signal(signal.SIGINT)
            rest, deadline = "", time.monotonic() + 60
            while process.poll() is None or select.select([ours], [], [], 0)[0]:
                assert time.monotonic() < deadline, rest[-2000:]
                if select.select([ours], [], [], 0.1)[0]:
                    rest += os.read(ours, 65536).decode(errors="replace")
            assert "Traceback" not in rest
            assert "\x1b[?1049l" in rest, "the screen is as it was"


def test_without_rich_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None\nimport blinkpy.packages as p; p.find_spec = lambda n: None\n"
    code += "from blinkpy.cli import main; sys.exit(main(['top', '--once']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "blinkpy: error: top needs rich: pip install 'blinkpy-serve[top]'\n"


def test_rates_and_quantiles(rng) -> None:
    """Against counting by hand: values are drawn, put into buckets, and looked for again."""
    bounds = [0.01, 0.1, 1.0, float("inf")]

    def text(values: list[float], tokens: int) -> str:
        rows = [
            f'blinkpy_wait_bucket{{worker="{w}",le="{b:g}"}} {sum(v <= b for v in values[w::2])}' for w in (0, 1) for b in bounds
        ]
        return "\n".join(["blinkpy_engine_up 1", f'blinkpy_tokens_total{{worker="0"}} {tokens}', "vllm:other 3", *rows]).replace(
            "inf", "+Inf"
        )

    first, second = (rng.lognormal(-3, 1.5, 400).tolist() for _ in range(2))
    before, now = parse_metrics(text(first, 100), 10.0), parse_metrics(text(first + second, 350), 12.5)
    assert now.rate(before, "tokens_total") == 100
    assert now.rate(None, "tokens_total") is None
    assert before.rate(now, "tokens_total") is None, "no time has passed"
    restarted = parse_metrics(text([], 20), 14.5)
    assert restarted.rate(now, "tokens_total") == 10
    for share in (0.05, 0.5, 0.9):
        found, exact = now.quantile(before, "wait", share), sorted(second)[int(share * len(second))]
        low = max([0.0, *(b for b in bounds if b < exact)])
        high = min(b for b in bounds if b >= exact)
        assert found is not None and low * 0.99 <= found <= min(high, 1.0) * 1.01, (share, exact)
    assert now.quantile(now, "wait", 0.5) is None
    assert now.quantile(None, "nothing", 0.5) is None


@pytest.mark.parametrize("width", [80, 100, 240])
def test_what_does_not_fit_is_left_out_from_the_right(width) -> None:
    console = Console(width=width, file=io.StringIO())
    ready = parse_metrics('blinkpy_engine_up 1\nblinkpy_engine_state{state="ready"} 1\nblinkpy_engine_requests_running 43\n', 1.0)
    console.print(
        top_table(console, {"http://10.0.0.1:8000": ready, "http://10.0.0.2:8000": ServerSample(1.0, problem="gone")}, {})
    )
    text = console.file.getvalue()
    assert "…" not in text
    assert "10.0.0.1:8000  ready   43" in text
    assert ("4xx" in text) == (width == 240)
    assert "TTFT" in text


def test_tenants_have_rows_by_what_they_take(rng) -> None:
    """Random figures of two workers and two servers, one of which has no tenants; against sums and an order made here."""
    names = [f"t{i}.x" for i in range(25)]
    counts = {name: rng.integers(0, 9, (4, 2)) for name in names}  # in flight, waiting, refused, tokens before; of two workers
    more = dict(zip(names, (rng.choice(10**6, len(names), replace=False) + 1).tolist(), strict=True))

    def text(later: bool) -> str:
        lines = ['blinkpy_engine_up 1\nblinkpy_requests_in_flight{worker="0"} 3']
        for name, table in counts.items():
            kinds = ("requests_in_flight", "waiting_requests", "requests_refused_total", "tokens_total")
            for kind, values in zip(kinds, table, strict=True):
                for worker, value in enumerate(values):
                    value = value + more[name] * (later and kind == "tokens_total" and worker)
                    lines.append(f'blinkpy_tenant_{kind}{{worker="{worker}",tenant="{name}"}} {value}')
        return "\n".join(lines)

    before, now = parse_metrics(text(False), 5.0), parse_metrics(text(True), 9.0)
    assert now.get("requests_in_flight") == 3, "of the server, not of its tenants"
    console = Console(width=100, file=io.StringIO())
    console.print(
        top_tables(console, {"http://a:1": now, "http://b:1": parse_metrics("blinkpy_engine_up 1", 9.0)}, {"http://a:1": before})
    )
    lines = console.file.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["server", "tenant"])
    order = sorted(names, key=lambda name: -more[name])
    rows = [[name, *(f"{counts[name][i].sum()}" for i in (0, 1)), more[name] / 4, f"{counts[name][2].sum()}"] for name in order]
    shown = [line.split() for line in lines[start + 1 : start + 21]]
    assert [[*row[1:4], row[5]] for row in shown] == [[*row[:3], row[4]] for row in rows[:20]]
    for row, expected in zip(shown, rows, strict=False):
        assert float(row[4].replace(",", "")) == pytest.approx(expected[3], rel=0.01, abs=0.6)
    assert lines[start + 21].strip() == "and 5 more"
    assert tenant_table({"http://b:1": parse_metrics("blinkpy_engine_up 1", 9.0)}, {}) is None


def test_other_servers_and_wrong_urls(folder) -> None:
    assert parse_metrics('vllm:num_requests_running{engine="0"} 1\n', 0.0).problem == "no metrics of blinkpy at this URL"
    with FakeEngine() as engine, serving(engine, folder) as server:
        assert look(server.url + "/nowhere", False).problem == "status 404"
        engine.state(W.STATE_DRAINING)
        assert look(server.url, False).state == "draining"
    for servers in ("ftp://a", "http://", "a:b", "", " ".join(f"h{i}" for i in range(65))):
        with pytest.raises(ConfigError):
            TopOptions(servers)
    assert TopOptions("a:1 http://a:1/ https://b").urls == ["http://a:1", "https://b"]
