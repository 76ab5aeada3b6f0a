"""Several engines behind one front end: placement, refusals, and choices that survive the loss of their engine.

Supports claim fleet/moves.

Tester storm of several engines: the fleet, with scripted engines | storms with fresh seeds
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.automata import random_automaton, random_counted_automaton
from support.front_end.fake_engine import SIZES, FakeEngine
from support.front_end.fleet_bugs import FLEET_BUGS
from support.front_end.fleet_storm import Storm
from support.front_end.http_server import serving
from support.part_of_cases import part_of
from support.seeded_bugs import Bug, patched_source, planted
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import STARTS_BYTES, map_starts
from blinkpy.dpu.fleet.engine_list import check_engines, engine_configs
from blinkpy.dpu.fleet.identity import IdentityCheck
from blinkpy.dpu.fleet.moves import started_at
from blinkpy.dpu.link.queue_pair import EngineLostError
from blinkpy.dpu.watch.log_output import FIELDS
from blinkpy.engine.sizing import model_digest
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.words import COUNTER
from blinkpy.serving import kept_engine
from blinkpy.serving.kept_engine import EngineGroup, gpus_of
from blinkpy.serving.serve import serve


class PlaceEngine(FakeEngine):
    """Answers with tokens that follow from the seed and the place in the sequence. pauses: for each entry the
    engine that comes first waits in the middle of a request."""

    def __init__(self, pauses: list[str], **more: Any) -> None:
        super().__init__(**more)
        self.pauses = pauses

    def says(self, request: Any) -> int:
        if request.made == 20 and self.pauses:
            self.pauses.pop()
            self.hold = True
        return 10 + (int(request.entry["seed"]) + 7 * (len(request.prompt) + request.made)) % 400


STEPS, STORMS, HUNTS = 300, 12, 60


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)  # thousands of losses
    yield
    logging.disable(logging.NOTSET)


def test_choices_survive_their_engines(seed: int) -> None:
    storms = [Storm(seed * 1000 + number).run(STEPS) for number in range(STORMS)]
    choices, moved = sum(len(storm.clients) for storm in storms), sum(storm.moved for storm in storms)
    assert choices > 100 and moved > 20, "too calm to say anything"
    assert sum(storm.whole for storm in storms) > choices // 4


def test_every_patch_fits() -> None:
    assert len({bug.what for bug in FLEET_BUGS}) == len(FLEET_BUGS) == len([patched_source(bug) for bug in FLEET_BUGS])


@pytest.mark.parametrize("bug", part_of(FLEET_BUGS, 2), ids=lambda bug: bug.what)
def test_a_seeded_bug_is_found(bug: Bug) -> None:
    """The seeds are always the same ones; half of the bugs in each run."""
    with planted(bug):
        for seed in range(HUNTS):
            try:
                Storm(seed).run(STEPS)
            except Exception:  # whatever it is, it was noticed
                return
    pytest.fail(f"nobody notices that {bug.what}")


def test_an_automaton_that_starts_elsewhere_accepts_what_follows(rng: np.random.Generator) -> None:
    for _ in range(200):
        automaton = random_automaton(rng) if rng.random() < 0.5 else random_counted_automaton(rng)
        begin = rng.integers(256, size=int(rng.integers(6))).astype(np.uint8).tobytes()
        state = automaton.advance(automaton.start, begin)
        if state == DEAD:
            continue
        rest = started_at(automaton, state)
        for _ in range(20):
            end = rng.integers(256, size=int(rng.integers(6))).astype(np.uint8).tobytes()
            assert rest.accepts(end) == automaton.accepts(begin + end)
            reached = automaton.advance(state, end)
            assert (rest.advance(rest.start, end) == DEAD) == (reached == DEAD)
        again = ByteAutomaton.of_words(rest.words())
        assert again.start == state and np.array_equal(again.next_state, rest.next_state)


def options(**values: Any) -> tuple[Config, frozenset[str]]:
    return Config().with_options(values), frozenset(values)


def test_engines_have_configs_of_their_own() -> None:
    alone, _ = options(name="x")
    assert engine_configs(alone) == {"x": alone}
    several = engine_configs(options(engine="a,b")[0])
    assert {label: (one.engine.name, one.transport.transport) for label, one in several.items()} == {
        "a": ("a", "shm"), "b": ("b", "shm"),
    }  # fmt: skip
    mixed, given = options(engine="10.0.0.1:7700,shm:b", transport="rdma", insecure_link=True)
    check_engines(mixed, given)
    found = engine_configs(mixed)
    assert [one.transport.transport for one in found.values()] == ["rdma", "shm"]
    assert found["shm:b"].engine.name == "b"
    check_engines(*options(engine="[::1]:7700,[::1]:7701", transport="rdma", insecure_link=True))


def test_serve_names_its_engines_itself() -> None:
    with pytest.raises(ConfigError, match="leave out engine"):
        serve(*options(engine="a,b"))


def test_each_engine_gets_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_engine, "GPUS", tmp_path / "none")
    monkeypatch.delenv(kept_engine.VISIBLE, raising=False)
    assert gpus_of(options(device="auto")[0], 2) == gpus_of(options(device="cpu")[0], 2) == []
    with pytest.raises(ConfigError, match="data_parallel_size 2 needs 2 GPUs, but this machine has 0"):
        gpus_of(options(device="cuda")[0], 2)
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(kept_engine, "GPUS", tmp_path)
    assert gpus_of(options(device="auto")[0], 2) == ["0", "1"]
    with pytest.raises(ConfigError, match="but this machine has 3"):
        gpus_of(options(device="auto")[0], 4)
    monkeypatch.setenv(kept_engine.VISIBLE, "5, GPU-x")
    assert gpus_of(options(device="cuda")[0], 2) == ["5", "GPU-x"]
    monkeypatch.setenv(kept_engine.VISIBLE, "5,GPU-x,2,7,1")
    assert gpus_of(options(device="cuda", tensor_parallel_size=2)[0], 2) == ["5,GPU-x", "2,7"]
    with pytest.raises(ConfigError, match="data_parallel_size 2 of tensor_parallel_size 3 needs 6 GPUs, but this machine has 5"):
        gpus_of(options(device="cuda", tensor_parallel_size=3)[0], 2)
    monkeypatch.setenv(kept_engine.VISIBLE, "")
    assert gpus_of(options(device="auto")[0], 2) == []


@pytest.mark.parametrize("gpus", [["5", "GPU-x", "2"], []], ids=["gpus", "cpu"])
def test_each_engine_of_a_group_has_its_own_gpu_name_and_word_of_its_starts(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines without GPUs share the cores, unless the option says how."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kept_engine, "KeptEngine", lambda *given: made.append(given))
    monkeypatch.setattr(kept_engine, "gpus_of", lambda config, engines: gpus)
    cores = len(os.sched_getaffinity(0))
    fd = os.memfd_create("test-starts")
    try:
        os.ftruncate(fd, 3 * STARTS_BYTES)
        for threads in (0, 7):
            made.clear()
            group = EngineGroup(options(name="x", threads=threads, data_parallel_size=3)[0], fd, bool)
            configs, starts, _, called, environments = zip(*made, strict=True)
            assert [config.engine.name for config in configs] == ["x-0", "x-1", "x-2"]
            assert [*engine_configs(group.front_config)] == ["x-0", "x-1", "x-2"]
            assert environments == (tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus) or ({},) * 3)
            assert [config.engine.threads for config in configs] == [threads or (0 if gpus else max(1, cores // 3))] * 3
            assert called == ("engine 0", "engine 1", "engine 2")
        for number, one in enumerate(starts):
            for _ in range(number):
                one.count()
        assert [map_starts(fd, number).restarts for number in range(3)] == [0, 1, 2]
    finally:
        os.close(fd)


WITHOUT_EFFECT = (  # on an engine's results; a new option is missing here until it is known
    *("model", "served_model_name", "max_model_len", "chat_template", "tool_call_parser", "reasoning_parser"),
    *("page_size", "num_pages", "gpu_memory_utilization", "cpu_cache_mib", "enable_prefix_caching"),
    *("state_snapshots", "snapshot_tokens", "speculative_model"),
)


def test_weights_and_options_that_change_them_have_digests_of_their_own(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = rng.integers(256, size=300_000).astype(np.uint8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    config = Config()
    digests = {model_digest(config, tmp_path, True)}
    assert digests == {model_digest(config, tmp_path, True)}
    for item in [*fields(config.model), *fields(config.cache)]:  # all options of these sections
        if item.name in WITHOUT_EFFECT:
            continue
        others = [name for name in item.metadata["choices"] if name != item.default]
        base = config.with_options({"load_format": "dummy"} if item.name == "seed" else {})
        found = {model_digest(base.with_options({item.name: one}), tmp_path, True) for one in others or [7]}
        assert len(found) == len(others or [7]) and not found & digests, item.name
        digests |= found
    assert model_digest(config.with_options({"seed": 7}), tmp_path, True) in digests, "without weights of its own"
    count = len(digests)
    digests.add(model_digest(config, tmp_path, False))
    (tmp_path / "model.safetensors").write_bytes((weights ^ rng.integers(2, size=len(weights)).astype(np.uint8)).tobytes())
    digests.add(model_digest(config, tmp_path, True))
    (tmp_path / "config.json").write_text("{ }")
    digests.add(model_digest(config, tmp_path, True))
    assert len(digests) == count + 3


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"engine": "a,a"}, "names 'a' twice"),
        ({"engine": "10.0.0.1:7700"}, "--engine 10.0.0.1:7700 needs --transport rdma"),
        ({"engine": "a,b", "name": "c"}, "--engine replaces --name"),
        ({"engine": "a,../b"}, "--engine ../b: a segment name is"),
        ({"engine": ",".join(f"e{i}" for i in range(65))}, "at most 64 engines, not 65"),
        ({"engine": "a,b", "insecure_link": True}, "--insecure-link needs --transport rdma"),
        ({"engine": "a:1,b", "transport": "rdma", "insecure_link": True}, "engine must be HOST:PORT, not 'b'"),
        ({"engine": "a:1,shm:b", "transport": "rdma", "insecure_link": True, "name": "c"}, "--name"),
    ],
)
def test_engines_that_can_not_be_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_engines(*options(**values))


FACTS = {
    "model_digest": 1, "tokenizer_digest": 2, "vocab_size": 600, "page_size": 16, "grammar_share": 4, "grammar_words": 9,
}  # fmt: skip


def pair(**changes: int) -> Any:
    values = {**FACTS, "context": 128, "longest_prompt": 127, **changes}
    context, longest = values.pop("context"), values.pop("longest_prompt")
    return SimpleNamespace(facts=SimpleNamespace(**values), context=context, longest_prompt=longest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_digest": 7}, "in model$"), ({"tokenizer_digest": 7}, "its tokenizer differs from this front end's"),
        ({"context": 64}, r"in context \(64, not 128\)$"), ({"vocab_size": 7}, r"in vocabulary \(7, not 600\)"),
        ({"page_size": 8}, r"in page size \(8, not 16\)"), ({"longest_prompt": 3}, r"in longest prompt \(3, not 127\)"),
        ({"grammar_share": 0, "grammar_words": 0}, r"in number of grammars \(0, not 4\), largest grammar \(0, not 9\)"),
    ],
)  # fmt: skip
def test_an_engine_that_is_another_is_refused_by_name(change: dict[str, int], named: str) -> None:
    check = IdentityCheck(2)
    check.check("a", pair())
    check.check("b", pair())
    with pytest.raises(EngineLostError, match=f"engine c is refused: .*{named}"):
        check.check("c", pair(**change))
    check.check("b", pair())


# ---- with a worker and its HTTP server ----------------------------------------------------------------------------------


def both(*engines: FakeEngine) -> str:
    return ",".join(engine.segment_name for engine in engines)


def test_a_whole_answer_moves_and_metrics_and_log_tell(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    caplog.set_level(logging.INFO, "blinkpy.access")
    pauses, wanted = list[str](), {"prompt": [7, 8, 9], "max_tokens": 100, "seed": 5, "ignore_eos": True}
    with (
        PlaceEngine(pauses) as first,
        PlaceEngine(pauses) as second,
        ThreadPoolExecutor(1) as pool,
        serving(first, folder, engine=both(first, second)) as server,
    ):
        wait_for(lambda: all(link.pair is not None for link in server.engine_client.links))
        expected = server.complete(**wanted).json()["choices"]
        pauses.append("one")
        begun = pool.submit(server.complete, **wanted)
        wait_for(lambda: first.hold or second.hold)
        gone, stays = (first, second) if first.hold else (second, first)
        gone.stop()
        answer = begun.result(60).json()
        assert answer["choices"] == expected
        assert answer["usage"]["completion_tokens"] == 100 and answer["usage"]["prompt_tokens"] == 3
        continued = stays.submitted[-1]
        assert continued.prompt[:3] == [7, 8, 9] and len(continued.prompt) > 8
        assert continued.entry["max_tokens"] == 103 - len(continued.prompt)

        def reported() -> list[int | None]:
            lines = [record for record in list(caplog.records) if record.name == "blinkpy.access"]
            return [getattr(line, FIELDS).get("moves") for line in lines]

        wait_for(lambda: len(reported()) == 2, 60, "both requests' lines, which may come after their answers")
        assert reported() == [None, 1], "the access log tells of the second request's move"
        text = server.client.get("/metrics").text
        assert f'blinkpy_each_engine_up{{engine="{gone.segment_name}"}} 0\n' in text
        assert f'blinkpy_each_engine_up{{engine="{stays.segment_name}"}} 1\n' in text
        assert 'blinkpy_moves_total{worker="0"} 1\n' in text
        slots = f'blinkpy_slots{{worker="0"}} {SIZES.slots}\n'  # of the engine that stays
        wait_for(lambda: slots in server.client.get("/metrics").text)
        assert "blinkpy_engine_up 1\n" in text
        assert f"blinkpy_engine_requests_accepted_total {int(stays.views.engine[COUNTER['requests_accepted']])}\n" in text


def test_without_any_engine_requests_are_refused_and_streams_end(folder: Path) -> None:
    pauses = ["one"]
    with (
        PlaceEngine(pauses) as first,
        PlaceEngine(pauses) as second,
        ThreadPoolExecutor(1) as pool,
        serving(first, folder, engine=both(first, second), move_timeout_s=1) as server,
    ):
        wait_for(lambda: all(link.pair is not None for link in server.engine_client.links))
        begun = pool.submit(server.complete, [7, 8], max_tokens=120, ignore_eos=True)
        wait_for(lambda: first.hold or second.hold)
        first.stop()
        second.stop()
        answer = begun.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1"
        refused = server.complete([7], max_tokens=1)
        assert refused.status_code == server.client.get("/health").status_code == 503
        assert refused.json()["error"]["message"].startswith("None of 2 engines serves.")
        with PlaceEngine(pauses, name=first.segment_name):
            server.ready()
            assert server.complete([7], max_tokens=1).status_code == 200


def test_a_drain_waits_for_a_request_that_is_between_two_engines(folder: Path) -> None:
    pauses = ["one"]
    with (
        PlaceEngine(pauses) as first,
        PlaceEngine(pauses) as second,
        ThreadPoolExecutor(1) as pool,
        serving(first, folder, engine=both(first, second), shutdown_s=20) as server,
    ):
        wait_for(lambda: all(link.pair is not None for link in server.engine_client.links))
        begun = pool.submit(server.complete, [7, 8], max_tokens=60, ignore_eos=True)
        wait_for(lambda: first.hold or second.hold)
        first.stop()
        second.stop()
        wait_for(lambda: server.engine_client.moves)
        server.server.should_exit = True
        wait_for(lambda: server.server.app.draining)
        with PlaceEngine(pauses, name=first.segment_name):
            answer = begun.result(60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 60


def test_the_placement_is_the_operators(folder: Path, tmp_path: Path) -> None:
    """A file with a rule is followed; if it raises for some requests, these are counted and served by other
    engines."""
    file = tmp_path / "last.py"
    file.write_text("def choose(request, engines):\n    assert request.prompt_tokens < 5\n    return engines[-1]\n")
    with (
        PlaceEngine([]) as first,
        PlaceEngine([]) as second,
        serving(first, folder, engine=both(first, second), placement=str(file)) as server,
    ):
        wait_for(lambda: all(link.pair is not None for link in server.engine_client.links))
        for prompt in ([7, 8], [7, 8, 9], [4]):
            assert server.complete(prompt, max_tokens=1).status_code == 200
        assert (len(first.submitted), len(second.submitted)) == (0, 3)
        assert server.complete([7] * 5, max_tokens=1).status_code == 200
        assert len(first.submitted) + len(second.submitted) == 4
        assert 'blinkpy_placement_faults_total{worker="0"} 1\n' in server.client.get("/metrics").text


@pytest.mark.parametrize(
    ("engine", "placement", "message"),
    [
        ("a,b", "fastest", "placement must be one of prefix, "),
        ("a,b", "no.py", "does not exist"),
        ("a", "random", "needs several engines"),
    ],
)
def test_a_wrong_placement_is_refused(engine: str, placement: str, message: str) -> None:
    config = Config().with_options({"engine": engine, "placement": placement})
    with pytest.raises(ConfigError, match=message):
        check_engines(config, frozenset({"engine", "placement"}))
    served = Config().with_options({"placement": placement, "data_parallel_size": len(engine.split(","))})
    with pytest.raises(ConfigError, match=message):
        serve(served, frozenset())
