"""The grammar of attacks: a seed repeats an attack, JSON keeps it, and each kind of work becomes the bytes of a request."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import pytest

from benchmarks.serving.attack_grammar import (
    CHUNKED,
    DRIPPED,
    NEIGHBOUR,
    PACES,
    PIPELINED,
    STALLED,
    STRANGER,
    TENANT,
    Attack,
)
from benchmarks.serving.attack_kinds import KINDS, LARGEST
from benchmarks.serving.attack_requests import pieces_of
from benchmarks.serving.attack_shapes import FIELDS, SHAPES, body_of_field
from blinkpy.dpu.http.endpoints import ENDPOINTS

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from attack.__main__ import Record, document, drawn, read_document, smaller
from attack.known import KEYS, NO_KEYS
from attack.site import LOSSES
from attack.trial import Plan, Trial, figures_of, judge
from attack.victim import ANSWER, CLOSED, HEALTH, LATE, Diary


def test_json_keeps_a_trial(seed: int, tmp_path: Path) -> None:
    kind, plan = drawn(seed, 0)
    assert drawn(seed, 0) == (kind, plan) != drawn(seed + 1, 0)
    (tmp_path / "found.json").write_text(json.dumps(document(kind, plan, Trial())))
    assert read_document(tmp_path / "found.json") == (kind, plan)
    with pytest.raises(ValueError, match="unknown words of an attack: never heard of"):
        Attack.of({"work": "never heard of"})


def test_smaller_plans_end_with_the_smallest(seed: int) -> None:
    """Whatever is chosen, each step makes the plan smaller; nothing is smaller than one plain client."""
    rng = random.Random(seed)
    _, plan = drawn(seed, 0)
    for _ in range(200):
        steps = list(smaller(plan))
        if not steps:
            break
        plan = rng.choice(steps)
    (attack,) = plan.attacks
    assert attack == Attack(attack.work, attack.who, 1, rounds=attack.rounds, prepared=attack.prepared)


def requests_in(data: bytes) -> list[tuple[bytes, str, bytes]]:
    """Method, path and body of each request in the bytes of a client."""
    found: list[Any] = []

    class Reader:
        def on_message_begin(self) -> None:
            found.append([b"", "", b""])

        def on_url(self, url: bytes) -> None:
            found[-1][1] += url.decode()

        def on_body(self, body: bytes) -> None:
            found[-1][2] += body

        def on_message_complete(self) -> None:
            found[-1][0] = parser.get_method()

    parser = httptools.HttpRequestParser(Reader())
    parser.feed_data(data)
    return [(bytes(method), path, bytes(body)) for method, path, body in found]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.path])
def test_each_kind_becomes_a_request(name: str, seed: int) -> None:
    """Of any size and pace: bytes that an HTTP parser takes, with a JSON body below the limit."""
    kind, rng = KINDS[name], random.Random(seed)
    for pace in PACES:
        size = 1 << rng.randrange(14)
        data = b"".join(pieces_of(Attack(name, TENANT, size=size, pace=pace), "secret", rng))
        found = requests_in(data)
        assert {path for _, path, _ in found} == {kind.path}
        assert {method.decode() for method, _, _ in found} == ({kind.method} if pace != STALLED else {""})
        assert (b"Bearer secret" in data) != (name == "wrong key")
        if pace in (DRIPPED, CHUNKED) or pace == "whole":
            ((_, _, body),) = found
            assert len(body) <= LARGEST
            if name == "nesting":  # deeper than Python reads
                assert body.count(b"[") == body.count(b"]") >= 8
            else:
                assert not kind.body or isinstance(json.loads(body), dict)
        if pace == PIPELINED:
            assert len(found) > 1 or 2 * len(data) > LARGEST


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_takes_every_shape(path: str, rng: np.random.Generator) -> None:
    """A body of about the size, with JSON that holds the field."""
    for field in FIELDS[path]:
        shape = str(rng.choice(sorted(SHAPES)))
        body = body_of_field(path, field, shape, 1700)
        assert field in json.loads(body) and len(body) <= 1700, shape


def test_every_endpoint_is_attacked() -> None:
    attacked = {(kind.method, kind.path) for kind in KINDS.values()}
    assert {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS} <= attacked


class FakeSite:
    """As much of a site as judge() looks at."""

    def __init__(self, tenants: bool = True):
        self.kind, self.most_mib = (KEYS if tenants else NO_KEYS), 500.0


QUIET, ATTACKED = (0.0, 10.0), (10.0, 20.0)
CALM = [(at / 50, 0.02) for at in range(1, 1000)]
ASKED = [(at / 10, 0.05, 200) for at in range(1, 200)]


def judged(attack: Attack, peak: float = 100.0, tenants: bool = True, **seen: Any) -> set[str]:
    """The bars that a diary breaks."""
    asked = {ANSWER: seen.get("answers", ASKED), HEALTH: seen.get("healths", ASKED)}
    diary = Diary(seen.get("gaps", CALM), asked, seen.get("broken", []))
    trial = Trial(figures_of(diary, QUIET, ATTACKED))
    judge(trial, Plan((attack,), "1"), FakeSite(tenants), diary, peak)  # type: ignore[arg-type]
    return set(trial.broken)


def late(entries: list[Any], seconds: float, every: int = 20, status: int = 200) -> list[Any]:
    """Each 20th entry during the attack takes longer."""
    return [
        (at, seconds, *([status] if rest else [])) if at > 10 and number % every == 0 else (at, usual, *rest)
        for number, (at, usual, *rest) in enumerate(entries)
    ]


def test_bars() -> None:
    body, get = Attack("short request", TENANT), Attack("GET /health", STRANGER)
    assert judged(body) == set()
    assert judged(body, gaps=late(CALM, 0.11)) == {"gap"}
    assert judged(body, gaps=late(CALM, 0.059)) == set()
    assert judged(body, gaps=late(CALM, 1.5, every=400)) == {"longest gap"}
    assert judged(replace(get, rounds=1), gaps=late(CALM, 0.2, every=400)) == {"longest gap"}
    assert judged(body, answers=late(ASKED, 1.2)) == {"answer"}
    assert judged(body, answers=late(ASKED, 0.1, status=503)) == {"refused"}
    assert judged(body, answers=late(ASKED, 0.1, status=CLOSED)) == {"refused", "unanswered"}
    assert judged(body, answers=late(ASKED, 20.0, status=LATE)) == {"answer", "refused", "late"}
    assert judged(body, healths=late(ASKED, 1.2)) == {"health"}
    assert judged(body, broken=["closed"]) == {"streams"}
    assert judged(body, peak=501.0) == {"memory"}
    own = Attack("all slots", NEIGHBOUR, 1, 128)
    assert judged(own, answers=late(ASKED, 1.2)) == set(), "its own tenant took the slots"
    assert judged(replace(own, who=TENANT), answers=late(ASKED, 1.2)) == {"answer"}
    assert judged(replace(own, size=64), answers=late(ASKED, 1.2)) == {"answer"}, "slots are free"
    assert judged(replace(own, who=TENANT), answers=late(ASKED, 1.2), tenants=False) == set()


def test_a_record_lists_each_trial_with_its_outcome(tmp_path: Path, seed: int) -> None:
    """Also if no bar broke. Each entry can be replayed."""
    record, trials = Record(), {number: drawn(seed, number) for number in range(20)}
    for number, (kind, plan) in trials.items():
        figures = figures_of(Diary(CALM, {ANSWER: ASKED, HEALTH: ASKED}), QUIET, ATTACKED)
        figures |= {
            "worker_mib": {"peak": 70.0},
            "seen": [{"200": number, "connections": 2 * number}, {"503": 1, "connections": 1}],
        }
        record.add(kind, plan, Trial(figures, {"gap": "too long"} if number % 3 == 0 else {}, ["a line"]), number)
    results = record.results()
    assert results["counts"] == {"trials": 20, "broken": 7, "connections": 400} and results["statuses"] == {"200": 190, "503": 20}
    assert results["findings"] == []
    for entry, (number, trial) in zip(json.loads(json.dumps(results["trials"])), trials.items(), strict=True):
        assert (entry["name"], bool(entry["broken"]), "log" in entry) == (number, number % 3 == 0, False)
        assert entry["figures"]["attacked"]["answers"] > 0
        (path := tmp_path / "trial.json").write_text(json.dumps(entry))
        assert read_document(path) == trial


def test_losses_are_found_in_the_metrics() -> None:
    """As the server shows them."""
    from blinkpy.dpu.metrics import Metrics
    from blinkpy.dpu.watch.exposition import Exposition

    metrics = Metrics()
    metrics.count("engine_losses", 3)
    shown = Exposition(metrics, "m").render(None, 0, None).decode()
    assert LOSSES.findall(shown) == ["3"]
