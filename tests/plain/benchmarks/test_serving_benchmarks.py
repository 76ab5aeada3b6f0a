"""What the serving benchmarks offer, compute and start; and the smoke grid as a whole. Nothing here is timed."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.front_end.scripted_server import scripted
from support.waiting import wait_for

from benchmarks.common import nvml as nvml_module
from benchmarks.common.harness import UsageError
from benchmarks.common.json_grammar import LONG_OBJECT
from benchmarks.common.load import LoadResult, Record, Request, Target
from benchmarks.common.model_shapes import SHAPES, write_folder
from benchmarks.common.nvml import EnergyMeter, interpolated
from benchmarks.report.pages import grid_page
from benchmarks.serving.classes import ARMS, SUSPENSIONS, arms_of, class_figures, compared
from benchmarks.serving.load_figures import Slo, figures, steps_of
from benchmarks.serving.neighbours import KINDS, Neighbours
from benchmarks.serving.systems import (
    Cores,
    Model,
    ServerError,
    alive,
    command_line,
    command_of,
    find_system,
    free_port,
    parse_cores,
    running,
)
from benchmarks.serving.workload import AZURE, BEST_EFFORT, SENSITIVE, Bursts, closed_loop, open_loop, read_dataset, two_classes
from blinkpy.config import EngineOptions
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.families.describe_model import describe_model
from blinkpy.progress import Progress

ROOT = Path(__file__).parents[3]
MODEL = Model("folder", "m", 1000, 500, True)


def test_a_load_with_a_schema_asks_for_it_and_waits_for_no_end() -> None:
    """The benchmark's schema is one that this front end takes, and no answer within its tokens is whole."""
    asked = [Target("h", 1, "m", schema=schema).request_bytes(Request(0.0, [1], 2)) for schema in (None, LONG_OBJECT)]
    free, bound = (json.loads(text.partition(b"\r\n\r\n")[2]) for text in asked)
    form = bound.pop("response_format")
    assert free == bound
    assert form["type"] == "json_schema" and form["json_schema"]["schema"] == LONG_OBJECT
    automaton = automaton_of_grammar({"schema": LONG_OBJECT})
    assert len(automaton.words()) * 4 <= 1024 * EngineOptions().grammar_kib
    states = {0}
    for _ in range(6 * 64):  # bytes: a town of one or more tokens, quotes and comma, each a token of its own
        assert not automaton.accepting[list(states)].any()
        states = set(automaton.next_state[list(states)].ravel().tolist()) - {-1}


def test_data_sets(tmp_path: Path) -> None:
    azure = read_dataset("azure", 8192)
    assert len(azure) == len(AZURE.read_text().splitlines()) - 1 == 2000
    assert tuple(azure[0]) == (1209, 396)
    short = read_dataset("azure", 1000)
    assert 0 < len(short) < 2000
    assert short.sum(1).max() <= 1000

    dated = tmp_path / "trace.csv"
    dated.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.50,3,4\n2023-11-16 18:16:46.75,5,6\n")
    assert read_dataset(f"azure:{dated}", 100).tolist() == [[3, 4], [5, 6]]
    spread = read_dataset("spread:3-5:6-9", 13)
    assert (spread.min(0).tolist(), spread.max(0).tolist()) == ([3, 6], [5, 9]) and (spread.sum(1) <= 13).all()
    for wrong in ("fixed:0:4", "fixed:4", "spread:5-3:1-2", "spread:3-4", "azure:/nowhere.csv", "else", "fixed:50:60"):
        with pytest.raises(UsageError, match=wrong.partition(":")[0]):
            read_dataset(wrong, 100)


def test_the_same_is_offered_to_all_with_new_contents(rng: np.random.Generator) -> None:
    data, seed = read_dataset("azure", 8192), int(rng.integers(1 << 30))
    first, second = (open_loop(data, 20.0, 30.0, seed, 1000, False) for _ in range(2))
    assert [(r.due, len(r.prompt), r.max_tokens) for r in first] == [(r.due, len(r.prompt), r.max_tokens) for r in second]
    assert [r.prompt for r in first] != [r.prompt for r in second]
    assert all(0 <= min(r.prompt) and max(r.prompt) < 1000 for r in first)
    due = np.array([r.due for r in first])
    assert (np.diff(due) >= 0).all() and 0 <= due.min() and due.max() < 30
    pairs = {tuple(row) for row in data.tolist()}
    assert all((len(r.prompt), r.max_tokens) in pairs for r in first)
    assert 450 < len(first) < 750  # 600 expected, standard deviation 24.5
    assert abs(np.mean(np.diff(due) * 20 > 1) - np.exp(-1)) < 0.12  # exponential
    streams = closed_loop(data, 4, 3, seed, 1000, False)
    assert len(streams) == 12
    texts = closed_loop(data, 4, 3, seed, 1000, True)
    assert [r.max_tokens for r in texts] == [r.max_tokens for r in streams]
    assert all(isinstance(r.prompt, str) and r.prompt for r in texts)


def test_a_shape_is_a_folder_that_blinkpy_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder("small", tmp_path / "small")
    assert describe_model(folder).vocab_size == SHAPES["small"]["vocab_size"]
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == SHAPES["small"]["vocab_size"]
    ids = rng.integers(300, tokenizer.vocab_size, 50).tolist()
    texts = [tokenizer.decode([token]) for token in ids]
    assert all(texts) and tokenizer.decode(ids) == "".join(texts)
    assert len(tokenizer.encode("the old house by the sea")) > 3


def record(due: float, times: list[float], tokens: int | None = None, error: str = "") -> Record:
    return Record(due, due + 0.001, len(times) if tokens is None else tokens, error, np.array(times))


def figures_of(records: list[Record], window_s: float = 10.0, lags: list[float] = [0.0001] * 200) -> dict:
    return figures(LoadResult(records, np.array(lags), 0.1, 0.0, 20.0), window_s, Slo(500, 200), EnergyMeter())


def test_two_classes_come_with_bursts_of_best_effort(rng: np.random.Generator) -> None:
    seed, bursts = int(rng.integers(1 << 30)), Bursts(5, 300, 7, 4.0)
    asked = [two_classes(read_dataset("fixed:20:3", 400), 50.0, 12.0, 0.3, bursts, seed, 99) for _ in range(2)]
    assert [(r.due, r.tier, len(r.prompt)) for r in asked[0]] == [(r.due, r.tier, len(r.prompt)) for r in asked[1]]
    assert [r.due for r in asked[0]] == sorted(r.due for r in asked[0])
    assert [(r.due, r.tier, r.max_tokens) for r in asked[0] if len(r.prompt) == 300] == [
        (due, BEST_EFFORT, 7) for due in (2.0, 6.0, 10.0) for _ in range(5)
    ]
    usual = [r.tier == SENSITIVE for r in asked[0] if len(r.prompt) == 20]
    assert abs(np.mean(usual) - 0.3) < 6 * np.sqrt(0.21 / len(usual))
    for request in asked[0]:
        told = [json.loads(Target("h", 1, "m").request_bytes(arm(request)).partition(b"\r\n\r\n")[2]) for arm in ARMS.values()]
        assert [body.get("service_tier") for body in told] == [None, None, request.tier]
        assert [body.get("priority", 0) for body in told] == [0, int(request.tier == BEST_EFFORT), 0]
    assert len(two_classes(read_dataset("fixed:20:3", 400), 50.0, 12.0, 0.3, Bursts(0, 1, 1, 4.0), seed, 99)) == len(usual)


def test_figures_of_known_classes() -> None:
    """Long prompts of the latency-sensitive have no part in TTFT; what was given up at 9 s waited until then."""
    asked = [(512, SENSITIVE), (513, SENSITIVE), (9, BEST_EFFORT), (9, BEST_EFFORT)]
    requests = [Request(1.0, [1] * length, 2, tier) for length, tier in asked]
    records = [record(1.0, [1.5, 2.0]), record(1.0, [5.0, 6.0]), record(1.0, [2.0, 4.0]), record(1.0, [], error="unfinished")]
    found = class_figures(requests, LoadResult(records, np.zeros(1), 0.0, 0.0, 9.0), 4.0)
    assert (found["ttft_ms"]["count"], found["ttft_ms"]["mean"]) == (1, 500.0)
    assert found["turnaround_ms"]["mean"] == (3000 + 8000) / 2
    assert found["best_effort_tokens_per_s"] == 2 / 4
    assert found[BEST_EFFORT] == {"requests": 2, "errors": {"unfinished": 1}}


def test_cells_are_compared_with_the_first_of_their_mix() -> None:
    def cell(share: float, tokens: float, turnaround: float, ttft: float) -> dict:
        found = {"best_effort_tokens_per_s": tokens, "turnaround_ms": {"mean": turnaround}, "ttft_ms": {"mean": ttft}}
        return {"mix": {"rate": 16.0, "sensitive": share}, "classes": found}

    cells = [cell(0.2, 100.0, 50.0, 900.0), cell(0.5, 10.0, 5.0, 90.0), cell(0.2, 90.0, 60.0, 30.0), cell(0.5, 10.0, 10.0, 45.0)]
    compared(cells)
    assert [tuple(one["against_first"].values()) for one in cells] == [(1, 1, 1), (1, 1, 1), (0.9, 1.2, 30), (1, 2, 2)]


def test_each_system_has_its_arms() -> None:
    options = argparse.Namespace(arm=["b:priority", "b:one class"])
    assert arms_of(options, ["a", "b"]) == {"a": ["one class", "classes"], "b": ["priority", "one class"]}
    for wrong in ("c:classes", "a:other", "a"):
        with pytest.raises(UsageError, match=r"--arm .*one of a, b and one of one class, priority, classes"):
            arms_of(argparse.Namespace(arm=[wrong]), ["a", "b"])


def test_suspensions_are_found_among_the_metrics() -> None:
    text = b'# TYPE blinkpy_engine_suspensions_total counter\nblinkpy_engine_suspensions_total{engine="0"} 12\n'
    assert SUSPENSIONS.findall(text) == [b"12"]


def test_lognormal_lengths_have_their_means() -> None:
    found = read_dataset("lognormal:161:338", 1 << 20)
    assert found.min() >= 1
    assert np.allclose(found.mean(0), (161, 338), rtol=6 * 1.31 / np.sqrt(len(found)))  # 1.31: deviation over mean, sigma 1
    for wrong in ("lognormal:161", "lognormal:0:3", "lognormal:a:3"):
        with pytest.raises(UsageError, match="data set lognormal"):
            read_dataset(wrong, 100)


def test_figures_of_known_records() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.3, 0.4, 0.5]),  # TTFT 100 ms, TPOT 100 ms
        record(1.0, [1.3, 1.7], tokens=5),  # TTFT 300, TPOT 100: five tokens in two events
        record(2.0, [2.9, 3.0]),  # TTFT 900: outside of the objective
        record(9.0, [9.2, 9.7, 10.2]),  # TPOT 500: outside too, and its last token comes after the window
        record(3.0, [3.1, 3.2, 3.3], tokens=0, error="unfinished"),  # TTFT 100
        record(4.0, [], tokens=0, error="status 429"),
        record(5.0, [], tokens=0, error="unfinished"),  # given up after 20 s: TTFT 15,000
    ]
    found = figures_of(records)
    assert (found["requests"], found["completed"]) == (7, 4)
    assert found["errors"] == {"unfinished": 2, "status 429": 1}
    assert found["ttft_ms"]["p50"]["value"] == pytest.approx(250)  # of 100, 300, 900, 200, 100 and 15,000
    assert found["ttft_ms"]["max"] == pytest.approx(15000)
    assert found["tpot_ms"]["p50"]["value"] == pytest.approx(100)
    assert found["tpot_ms"]["max"] == pytest.approx(500)
    assert found["itl_ms"]["count"] == 4 + 1 + 1 + 2
    assert found["itl_ms"]["max"] == pytest.approx(500)
    assert found["e2e_ms"]["max"] == pytest.approx(1200)
    assert found["output_tokens_per_s"] == pytest.approx((5 + 5 + 2 + 2 + 3) / 10)
    assert found["requests_per_s"] == pytest.approx(0.3)
    assert found["goodput_per_s"] == pytest.approx(0.2)
    assert found["client"]["valid"]
    for name in ("ttft_ms", "tpot_ms"):
        for level in ("p50", "p90", "p99"):
            assert found[name][level]["low"] <= found[name][level]["value"] <= found[name][level]["high"]


def test_closed_window_ends_when_the_first_stream_does() -> None:
    records = [record(0.0, [1.0, 2.0]), record(0.0, [1.0, 3.0]), record(2.0, [3.0, 4.0]), record(3.0, [4.0, 6.0])]
    found = figures_of(records, window_s=0.0)
    assert found["window_s"] == 4.0
    assert found["output_tokens_per_s"] == pytest.approx(7 / 4)


def test_a_client_that_fell_behind_is_said() -> None:
    fine = [record(0.0, list(np.arange(1, 12) * 0.01))]  # TPOT 10 ms
    assert figures_of(fine)["client"]["valid"]
    late = figures_of(fine, lags=[0.0001] * 150 + [0.0025] * 50)["client"]
    assert not late["valid"] and "(p99) of 2.5 ms" in late["why_invalid"]
    waiting = [record(0.0, list(1 + np.arange(1, 12) * 0.1))]  # TTFT 1,100 ms: 2.5 ms are little, 60 ms are not
    assert figures_of(waiting, lags=[0.0001] * 150 + [0.0025] * 50)["client"]["valid"]
    assert "above 55 ms" in figures_of(waiting, lags=[0.0001] * 150 + [0.06] * 50)["client"]["why_invalid"]
    rest = [record(0.0, list(0.02 + np.arange(1, 12) * 0.01)) for _ in range(50)]  # the slowest TTFT decides
    assert figures_of([*rest, *waiting * 3], lags=[0.0001] * 150 + [0.0025] * 50)["client"]["valid"]
    slow = figures_of(fine, lags=[0.0007] * 200)["client"]
    assert not slow["valid"] and "(p50)" in slow["why_invalid"] and "TPOT" in slow["why_invalid"]
    assert not figures_of([record(0.0, [], 0, "status 503")], lags=[0.003] * 200)["client"]["valid"]


def test_steps_follow_from_the_answers() -> None:
    """Two requests whose steps are known: 10 ms alone, 20 ms together, and the window ends in the middle of the second one."""
    one, other = np.arange(101) * 0.01, 1 + np.arange(101) * 0.02
    assert steps_of([record(0.0, list(one)), record(0.9, list(other))], 2.0) == {"per_s": 75.0, "tokens": 1.0}  # 100 and 50 steps
    slow = list(np.arange(101) * 0.02)
    assert steps_of([record(0.0, slow), record(0.0, slow)], 2.0) == {"per_s": 50.0, "tokens": 2.0}
    assert steps_of([record(0.0, [], 0, "status 503"), record(0.0, [0.1])], 2.0) is None


def test_nothing_completed_is_a_result_too() -> None:
    found = figures_of([record(0.0, [], 0, "status 503")] * 3)
    assert found["errors"] == {"status 503": 3}
    assert "ttft_ms" not in found
    assert found["output_tokens_per_s"] == 0


def test_energy_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [(0.0, 100.0), (1.0, 300.0), (3.0, 400.0)]
    assert interpolated(marks, 0.5, 2.0) == pytest.approx(150)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with EnergyMeter() as meter:
        assert meter.missing and meter.joules(0, 1) is None and meter.watts(1) is None


def nvml(uuids: tuple[str, ...] = ("GPU-abcd", "GPU-bbcd", "GPU-cdef"), **more: object) -> SimpleNamespace:
    """NVML with some GPUs, whose handles are their numbers, and whose clock changes."""
    clocks = itertools.cycle([1000, 1980])
    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetName=lambda handle: uuids[handle],
        nvmlSystemGetDriverVersion=lambda: "5",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=2**30),
        nvmlDeviceGetPowerManagementLimit=lambda handle: 700_000,
        **{"nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1000 * handle} | more,
        nvmlDeviceGetClockInfo=lambda handle, kind: next(clocks),
    )


def test_energy_and_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that counts 300 W, up to the time that was asked for last."""
    began, asked = time.perf_counter(), threading.local()
    clock = SimpleNamespace(perf_counter=lambda: setattr(asked, "time", time.perf_counter()) or asked.time, sleep=time.sleep)
    monkeypatch.setattr(nvml_module, "time", clock)
    library = nvml(nvmlDeviceGetTotalEnergyConsumption=lambda handle: 300_000 * (getattr(asked, "time", began) - began))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with EnergyMeter() as meter:
        wait_for(lambda: len(meter._clocks) >= 3, 60)
        watts = list[float]()
        wait_for(lambda: watts.extend(each for each in [meter.watts(0.2)] if each is not None) or watts)
        assert watts == [300]
    assert meter.facts == {"gpu": "GPU-abcd", "driver": "5", "memory_gib": 1.0, "power_limit_w": 700.0}
    (first, low), (second, high), *_ = meter._clocks
    assert {low, high} == {1000, 1980}
    assert meter.clock_mhz(first, second) == 1490 and meter.clock_mhz(second, second) == high
    assert meter.clock_mhz(second + 1000, second + 2000) is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        *((None, 0), ("1", 1), ("2, 0", 2), ("GPU-bbcd", 1), ("GPU-c,0", 2)),
        *((text, "names no GPU") for text in ("", "-1", "GPU-x")),
    ],
)
def test_the_meter_reads_the_gpu_that_the_servers_see(
    visible: str | None, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = EnergyMeter()
    if isinstance(expected, int):
        assert meter._joules() == expected and not meter.missing
    else:
        assert expected in meter.missing and not meter.facts


def test_systems_from_the_command_line() -> None:
    system = find_system("vllm", ["vllm:--swap-space 0", "other:--x"], ["vllm:A=b=c"])
    assert system.environment["A"] == "b=c"
    words = command_of(system, MODEL, 81)
    assert words[0] == sys.executable and words[-2:] == ["--swap-space", "0"] and "81" in words
    assert words[words.index("--load-format") + 1] == "dummy"
    assert "dummy" not in command_of(system, Model("folder", "m", 1000, 500, False), 81)
    assert command_of(find_system("x=serve {model} -p {port}"), MODEL, 81) == ["serve", "folder", "-p", "81"]
    assert find_system("y=http://h:80/").url == "http://h:80"
    variant = find_system("short=blinkpy", ["short:--policy p.py:f", "blinkpy:--workers 2"])
    assert variant.name == "short" and variant.front_end == find_system("blinkpy").front_end
    assert command_of(variant, MODEL, 81)[-2:] == ["--policy", "p.py:f"]
    assert find_system("x=serve", (), (), ["x:api|http", "vllm:no"]).front_end == "api|http"
    with pytest.raises(UsageError, match="unknown system 'vlm'"):
        find_system("vlm")


def test_cores() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert parse_cores(f"{mine[0]}-{mine[0]},{mine[-1]}") == (mine[0], mine[-1])
    assert parse_cores("") == ()
    with pytest.raises(UsageError, match="may not use core 100000"):
        parse_cores("100000")
    with pytest.raises(UsageError, match="neither a core"):
        parse_cores("1-x")
    cores = Cores((0, 1, 2, 3), (4, 5, 6), front_end=(2, 3))
    assert cores.contended == (0, 1)
    assert (cores.loading, cores.watching) == ((4, 5), (6,))
    assert cores.spare(2) and not cores.spare(3)  # two cores for two processes, and no server there
    assert not Cores((0, 1, 4), (4, 5, 6)).spare(1) and not Cores((0,)).spare(1)
    alone = Cores((0,), (1,))
    assert (alone.loading, alone.watching) == ((1,), (1,))
    assert (Cores((0,)).loading, Cores((0,)).watching) == ((), ())
    assert cores.shared.contended == (0, 1, 2, 3)


def test_ports_are_not_those_of_connections() -> None:
    """A client's connection must not take a server's port while that starts."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10 and not any(low <= port <= high for port in ports)


CHILD = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def test_a_server_that_does_not_become_healthy_is_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cores = Cores(tuple(sorted(os.sched_getaffinity(0))))
    failing = find_system(f"broken={sys.executable} -c 'import sys; sys.exit(\"no such model\")'")
    with pytest.raises(ServerError, match=r"exit code 1.*\n.*no such model"), running(failing, MODEL, cores, log, 60, Progress()):
        pass
    script = tmp_path / "hang.py"
    script.write_text(CHILD)
    hanging = find_system(f"hanging={sys.executable} {script}")
    before = set(os.listdir("/proc"))
    with pytest.raises(ServerError, match=r"not healthy within 2 s"), running(hanging, MODEL, cores, log, 2, Progress()):
        pass
    left = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and alive(int(pid))]
    lines = [command_line(int(pid)) for pid in left]
    assert not [line for line in lines if "time.sleep(600)" in line or str(script) in line]


def test_a_server_at_a_url_is_left_alone(tmp_path: Path) -> None:
    with scripted() as server:  # it understands POST only, so it is not healthy
        system = find_system(f"there=http://127.0.0.1:{server.port}")
        there = running(system, MODEL, Cores((0,)), tmp_path / "log", 5, Progress())
        with pytest.raises(ServerError, match="does not answer 200"), there:
            pass


def test_neighbours_work_and_end() -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))[:1]
    with Neighbours(KINDS, len(KINDS), cores) as neighbours:
        pids = [process.pid for process in neighbours._processes]
        assert neighbours.count == len(pids) == len(KINDS)
        wait_for(lambda: all(worked(pid) for pid in pids), 60)
        assert all(os.sched_getaffinity(pid) == set(cores) for pid in pids)
    assert not any(alive(pid) for pid in pids)
    with Neighbours(KINDS, 0, cores) as nobody:
        assert nobody.count == 0


def worked(pid: int) -> bool:
    """Whether a neighbour, or what it started, took more CPU time than a start needs."""
    user, system, of_children, system_of_children = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
    return int(user) + int(system) + int(of_children) + int(system_of_children) >= 10  # ticks


def grid(output: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    places = ["--output", str(output), "--logs", str(output.parent)]
    words = [sys.executable, "-m", "benchmarks.serving.grid", "--smoke", *places, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_smoke_grid_is_measured_once(tmp_path: Path) -> None:
    """The demonstration model on the CPU, isolated and beside neighbours; a second run has nothing left to do."""
    output, state = tmp_path / "paper.json", tmp_path / "state"
    cores = sorted(os.sched_getaffinity(0))
    both = len(cores) > 1  # placements of the front end
    places = ["--frontend-cores", str(cores[-1]), "--shared-rates", "4"] if both else []
    # Beside neighbours on one core an engine may pause for seconds: that is no error here.
    patient = ["--extra", "blinkpy:--device cpu --engine-timeout-ms 60000", "--env", "blinkpy:OMP_NUM_THREADS=1"]
    arguments = ["--state", str(state), *patient, *places]
    done = grid(output, *arguments, "--streams", "3")
    document = json.loads(output.read_text())
    results = document["results"]
    assert results["complete"]
    own = "own" if both else "shared"
    open_loops = [("isolated", 4, 0, own), ("isolated", 12, 0, own), ("interfered", 4, 0, own), ("interfered", 12, 0, own)]
    other = [("isolated", 4, 0, "shared"), ("interfered", 4, 0, "shared")] if both else []
    found = [tuple(cell["cell"][key] for key in ("mode", "rate", "streams", "front_end")) for cell in results["cells"]]
    assert found == [*open_loops, ("isolated", 0, 3, own), *other]
    for cell in results["cells"]:
        assert cell["errors"] == {} and cell["completed"] == cell["requests"] > 0
        assert cell["steps"]["per_s"] > 0
        assert (cell["neighbours"] > 0) == (cell["cell"]["mode"] == "interfered")
        assert cell["front_end"] == cell["cell"]["front_end"]
        assert cell["server"]["version"] and cell["server"]["start_to_healthy_s"] > 0
        assert cell["server"]["environment"] == {"OMP_NUM_THREADS": "1"}
        assert not both or cell["server"]["front_end_processes"] == 2 * (own == cell["front_end"])  # the worker and its parent
    assert f"| blinkpy, interfered, 12 requests/s, front end {own} |" in done.stdout
    assert grid_page(results)
    assert str(ROOT) not in output.read_text() and str(tmp_path) not in output.read_text()

    kept = {path.name: path.read_bytes() for path in state.iterdir()}
    lost = f"blinkpy-isolated-4-{own}-0.json"
    (state / lost).unlink()
    again = grid(output, *arguments, "--budget", "1")  # no time to measure it again
    assert f"{len(found) - 2} of {len(found) - 1} cells are done" in again.stdout  # the closed loop isn't asked for, but kept
    assert "starting" not in again.stderr
    assert {path.name: path.read_bytes() for path in state.iterdir()} == {n: data for n, data in kept.items() if n != lost}
    assert len(json.loads(output.read_text())["results"]["cells"]) == len(found) - 1
    refused = grid(output, *arguments, "--seed", "2", code=2)
    assert "cells of another grid (seed)" in refused.stderr


def test_a_system_that_fails_is_said(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--state", str(tmp_path / "state"), "--system"]
    done = grid(output, *arguments, "gone=/nowhere/server", code=1)
    assert "can't start /nowhere/server" in done.stderr and "Traceback" not in done.stderr
    assert "can't start" in json.loads(output.read_text())["results"]["errors"]["gone"]
    done = grid(output, *arguments, "vlm", code=2)
    assert "unknown system 'vlm'" in done.stderr and "Traceback" not in done.stderr
