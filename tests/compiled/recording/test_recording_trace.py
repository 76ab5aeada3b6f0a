"""The explanations of a replay: the reasons why requests waited, were chosen, chunked or preempted."""

from collections import Counter
from itertools import pairwise

import numpy as np
from support.recorded_cases import RecordedCase, RecordedStorm, Recording, crowded

from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.submission import SUBMIT_SCORE_PROMPT
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.policies import fcfs
from blinkpy.verify.replay.replay_command import Timeline
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.replay.request_events import Event, EventTracer


def reported(recording: Recording) -> list[Event]:
    replay = Replay(recording.reader.capture(), fcfs)
    tracer, events = EventTracer(replay.limits, replay.state), []
    for turn, differences in replay.run():
        assert not differences
        events += tracer.events_of(turn)
    return events


def texts(events: list[Event], request: int, kind: str) -> list[str]:
    return [event.text for event in events if (event.request, event.kind) == (request, kind)]


def test_a_trace_states_the_reasons() -> None:
    case = crowded()
    events = reported(case.recording)
    assert texts(events, -1, "granted") == ["queue pair 0 to its claimant"]
    assert "14 prompt tokens, at most 10 new, priority 0, rank 0" in texts(events, 0, "accepted")[0]
    assert texts(events, 0, "chunk") == [
        "prompt tokens 0 to 8 of 14: the step's 8 tokens leave 6 for later",
        "prompt tokens 8 to 14 of 14, the last ones",
    ]
    assert texts(events, 2, "waits") == ["all 2 rows are taken", "behind #1, which is served first"]
    assert texts(events, 3, "waits") == ["behind #2, which is served first", "all 2 rows are taken"]
    assert len(texts(events, 1, "preempted")) == case.counter("preemptions") == 1
    assert texts(events, 1, "preempted")[0].startswith("no page was free; its rank 1 was the last of the running requests")
    assert texts(events, 1, "waits") == [
        "a request was preempted in this turn, so no request is admitted",
        "pages: it needs 1 in addition to 2 cached ones; 2 are free or cached, 1 of them kept for running requests",
    ]
    assert texts(events, 0, "finished") == ["at max_tokens, after 10 tokens"]
    assert sum(event.kind == "finished" for event in events) == 4


def test_a_trace_states_moved_requests() -> None:
    case = RecordedCase(record=256, pairs=1)
    for output_tokens in (0, 3):
        case.submit([1, 2, 3, 4, 5], 4, output_tokens=output_tokens)
    case.finish()
    first, second = (texts(reported(case.recording), request, "accepted")[0] for request in (0, 1))
    assert "moved" not in first
    assert second.endswith(", moved here from another engine with 3 tokens of output, at the end of its prompt")


def test_a_trace_states_what_best_effort_lacks() -> None:
    """It lacks pages, its part of a step, or the next step. Latency-sensitive requests overtake it, and only wait for a row."""
    sizes = {"pairs": 1, "slots": 8, "rows": 4, "tokens": 16, "pages": 40, "page_size": 4, "max_model_len": 40}
    case = RecordedCase(record=512, best_effort_pages=0.25, best_effort_step_tokens=8, **sizes)
    for length, best_effort in ((24, 1), (4, 1), (22, 1), (3, 0)):
        case.submit([length] * length, 4, entry={"best_effort": best_effort})
        case.turn()
    for length, best_effort in ((35, 0), (5, 1)):
        case.submit([length] * length, 4, entry={"best_effort": best_effort})
    for _ in range(40):
        case.turn()
        case.read(0)
    events = reported(case.recording)
    step, pages = (
        "best effort's share of the step: its 8 tokens are taken",
        "best effort's share of the pages: it needs 2; 8 of 10 are held",
    )
    yields = "it yields to latency-sensitive prompts"
    assert texts(events, 1, "waits") == [step, yields]
    assert texts(events, 2, "waits") == ["behind #1, which is served first"]
    assert not texts(events, 3, "waits") + texts(events, 4, "waits"), "they overtake it"
    assert texts(events, 5, "waits") == ["behind #1, which is served first", step, pages]


def test_a_trace_says_when_no_more_may_pass_best_effort() -> None:
    case = RecordedCase(record=512, pairs=1, slots=8, rows=3, tokens=16, yield_steps=1)
    case.submit([1] * 3, 20)
    case.turn()
    for best_effort in (1, 0, 0):
        case.submit([2 + best_effort] * 3, 4, entry={"best_effort": best_effort})
    for _ in range(30):
        case.turn()
        case.read(0)
    events = reported(case.recording)
    assert texts(events, 1, "waits") == ["it yields to latency-sensitive prompts, and the limit of overtakings is reached"]
    assert not texts(events, 2, "waits")
    assert texts(events, 3, "waits") == ["behind #1, which is served first", "all 3 rows are taken"]


def test_a_trace_tells_of_readers_cancels_leases_and_refusals() -> None:
    case = RecordedCase(record=512, pairs=2, rows=2, cq_entries=2, pages=32)
    case.submit([1, 2, 3], 8)
    other = case.submit([4, 5], 20, pair=1)
    for _ in range(6):
        case.turn()
        case.read(1)
    case.read(0)
    case.turn()
    case.submit([1] * 5, 8, pair=1, rejected=True, entry={"temperature": -1})
    case.cancel(other)
    case.turn()
    case.silent.add(0)
    case.now += 3 * case.limits.lease_ns
    case.turn()
    events = reported(case.recording)
    assert texts(events, 0, "stalled") == ["the completion ring of queue pair 0 is full"]
    assert texts(events, 0, "continues") == ["the completion ring of queue pair 0 has space again"]
    assert texts(events, -1, "rejected") == ["an entry of queue pair 1: a parameter is out of range"]
    assert texts(events, 1, "cancelled") == ["its front end cancelled it while it was running"]
    assert "queue pair 0: its lease ended" in texts(events, -1, "revoked")
    assert texts(events, 0, "dropped") == ["its front end lost queue pair 0 while it was running"]


def test_a_request_that_ends_in_the_turn_that_its_pair_is_lost_is_not_dropped() -> None:
    """The request's end precedes the loss: rules R6 and R7. If a step's error ended it, neither its length nor its slot shows the
    end."""
    case = RecordedCase(pairs=1, rows=2)
    case.submit([1, 2, 3], 8)
    case.submit([4, 5], 8)
    case.turn()
    case.state.batch.sampled[1] = -1  # the step failed for the second request
    case.silent.add(0)
    case.now += 3 * case.limits.lease_ns
    case.turn()
    events = reported(case.recording)
    assert [(event.request, event.kind) for event in events if event.kind in ("finished", "dropped")] == [
        (0, "dropped"),
        (1, "finished"),
    ]
    assert case.counter("requests_finished") == case.counter("requests_cancelled") == 1


def test_a_scored_prompt_that_is_cancelled_did_not_end_at_its_grammar() -> None:
    """The grammar ends at its start, but the request has no generated token yet."""
    case = RecordedCase(pairs=1, share=2)
    nothing = ByteAutomaton(np.zeros(256, np.uint8), np.full((1, 1), -1, np.int16), np.ones(1, np.bool_))
    request = case.submit(list(range(9)), 5, grammar=nothing, flags=SUBMIT_SCORE_PROMPT, logprobs=0)
    case.turn(3)
    case.cancel(request)
    case.turn()
    assert [event.kind for event in reported(case.recording) if event.request == 0][-1] == "cancelled"


def test_traces_of_random_storms_tell_the_story_of_each_request(seed: int) -> None:
    """Each request is accepted once and ends once; between these it starts once more than it is preempted, or never."""
    for number in range(seed, seed + 6):
        storm = RecordedStorm(number, 120, record=4096, mode="python")
        storm.ending = COMMAND_RUN  # all requests end
        assert storm.run().failure is None
        events, counters = reported(storm.recording), storm.counters()
        counted = Counter(event.kind for event in events)
        for kind, counter in (("accepted", "requests_accepted"), ("finished", "requests_finished"), ("preempted", "preemptions")):
            assert counted[kind] == counters[counter]
        for request in range(counted["accepted"]):
            of = Counter(event.kind for event in events if event.request == request)
            assert of["accepted"] == of["finished"] + of["cancelled"] + of["dropped"] == 1
            assert of["starts"] - of["preempted"] in (0, 1)
            assert of["finished"] == 0 or of["starts"] == of["preempted"] + 1


def test_spans_of_a_timeline_cover_the_life_of_each_request() -> None:
    replay = Replay(crowded().recording.reader.capture(), fcfs)
    timeline = Timeline()
    for turn, _ in replay.run():
        timeline.take(turn, replay.state)
    for request in range(4):
        spans = [span for span in timeline.spans if span.request == request]
        assert all(first.end == second.begin for first, second in pairwise(spans))
    assert [span.what for span in timeline.spans if span.request == 0] == ["prefill", "decoding"]
    assert "preempted" in {span.what for span in timeline.spans if span.request == 1}
