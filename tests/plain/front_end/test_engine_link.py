"""The queue pair on an event loop, call by call: clock, timers, sleeps and queue pair are stand-ins that note what happens."""

import errno
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkpy.dpu import engine_link
from blinkpy.dpu.api_errors import ApiError, sentence
from blinkpy.dpu.engine_link import RECONNECT_S, EngineLink
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet import engines, moves
from blinkpy.dpu.fleet.engines import CONNECT_POLL_S, Engines
from blinkpy.dpu.link.link_thread import CHECK_S
from blinkpy.dpu.link.queue_pair import EngineLostError, EngineUnavailableError, NoSpaceError
from blinkpy.dpu.token_feed import POLL_S
from blinkpy.queues.layout import LayoutError
from blinkpy.queues.words import HAS_TOKEN, STATE_DRAINING, STATE_READY
from blinkpy.transport.contract import TransportError

LOST, UNAVAILABLE = EngineLostError("the engine is gone"), EngineUnavailableError("the engine is draining")
BROKEN = TransportError(errno.EIO, "the card fell out")


class Log(list[Any]):
    """The events, as (name, arguments ...). noted(name): a function that adds to it and returns, or raises, its
    outcome."""

    def noted(self, name: str, outcome: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            self.append((name, *arguments))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return call

    def taken(self) -> list[Any]:
        found = self[:]
        self.clear()
        return found


class Choice:
    """Instead of a Generation: notes the calls. stops: push() asks for the end."""

    def __init__(self, log: Log, name: str, stops: bool = False) -> None:
        self.log, self.name, self.stops, self.open, self.touched = log, name, stops, True, False
        self.finish_reason: str | None = None
        self.leader: Any = None
        self.grammar: Any = None
        self.flight: Any = None
        self.rules: Any = None
        self.prediction = None
        self.scoring = False
        self.plain: Any = None
        self.tokens = 0
        self.error: Any = None
        self.request: Any = SimpleNamespace(owner=self, name=name)
        self.arrival, self.last_event, self.first_event, self.submitted = 1.0, 0.0, 0.0, 0.0
        self.sink = SimpleNamespace(send=log.noted("send"))

    def push(self, token: int, flags: int) -> bool:
        self.log.append(("push", self.name, token, flags))
        if flags & 0xF:
            self.finish_reason = "length"
        return self.stops

    def flush(self) -> None:
        assert not self.touched
        self.log.append(("flush", self.name, self.last_event))

    def fail(self, error: ApiError) -> None:
        if self.open:
            self.log.append(("fail", self.name, error.status, error.message))


DETACHED = [("gauge", name, 0) for name in ("attached", "slots", "requests_in_flight")]
GAUGES = [("gauge", "slots", 9), ("gauge", "requests_in_flight", 1)]  # of each beat


class Stage:
    """A link with an attached pair, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.now, self.timers = Log(), 100.0, list[float]()
        log = self.log
        metrics: Any = SimpleNamespace(count=log.noted("count"), gauge=log.noted("gauge"))
        for name in ("inter_token_latency", "time_to_first_token", "request_duration"):
            setattr(metrics, name, SimpleNamespace(observe=log.noted(name)))
        self.thread: Any = SimpleNamespace(
            add=lambda pair, on_loss: log.append(("thread.add", pair is self.pair, on_loss == self.link._on_loss)),
            remove=lambda pair: log.append(("thread.remove", pair is self.pair)),
            close=log.noted("thread.close"), start=log.noted("thread.start"), report_progress=lambda: None,
        )  # fmt: skip
        self.link: Any
        self.owner: Any = Engines([EngineEntry("one", log.noted("connect"))], metrics, False, self.thread)
        (self.link,) = self.owner.links
        monkeypatch.setattr(engine_link, "time", SimpleNamespace(monotonic=lambda: self.now))
        transport = SimpleNamespace(
            read_engine_state=lambda: STATE_READY, read_engine=lambda: [1, 2], close=log.noted("transport.close"), pair=2
        )  # fmt: skip
        self.pair: Any = SimpleNamespace(
            transport=transport, facts=SimpleNamespace(lease_ms=2000), stray_completions=0, in_flight=1, free_slots=9, epoch=4,
            state_name=lambda: "draining", poll=lambda *most: [], stopped_early=False, live=list, abandon=list,
            close=log.noted("pair.close"), cancel=lambda request: log.append(("cancel", request.name)),
            refresh=log.noted("refresh"), sizes=SimpleNamespace(slots=9),
            submit=lambda prompt, sampling, owner: (log.append(("submit", owner.name, sampling)), owner.request)[1],
        )  # fmt: skip
        self.link.pair = self.pair
        self.link._loop = SimpleNamespace(call_later=self.later)
        self.link._pace = SimpleNamespace(delay=self.delay, restart=log.noted("restart"))
        self.polls: list[tuple[float, bool, bool]] = []

    def delay(self, *poll: Any) -> float:
        self.polls.append(poll)
        return 0.25 + len(self.polls)

    def later(self, delay: float, call: Any) -> Any:
        assert call == self.link._poll
        self.timers.append(delay)
        return SimpleNamespace(cancel=self.log.noted("timer.cancel"))

    def lost(self, *owners: str, problem: str = "The card fell out.") -> list[Any]:
        """The consequences of a loss."""
        fails = [("fail", name, 503, problem) for name in owners]
        return [("thread.remove", True), ("count", "engine_losses"), *DETACHED, ("transport.close",), *fails]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_polls_feed_choices_and_wait_as_steps_suggest(stage: Stage, seed: int) -> None:
    draw, link, log, free_slots = random.Random(seed), stage.link, stage.log, list[int]()
    for turn in range(400):
        stage.now += draw.choice((0.0005, 0.001, 0.004, 0.02, 0.04, 0.3))
        choices = [Choice(log, f"c{i}", draw.random() < 0.2) for i in range(draw.choice((1, 2, 4, 8)))]
        for choice in choices:
            choice.last_event, choice.open = draw.choice((0.0, 50.0, 50.0, 60.0)), draw.random() < 0.9
            choice.error = draw.choice((None, None, "error"))
            choice.finish_reason = draw.choice((None, None, None, "stop"))
            if choice.last_event and choice.finish_reason is None and draw.random() < 0.5:  # behind its first event: a shortcut
                choice.plain, choice.stops = SimpleNamespace(push=log.noted(f"plain {choice.name}")), False
        finished = {choice.name for choice in choices if choice.finish_reason}
        came, over = list[Any](), set[Choice]()
        for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
            choice, flags = draw.choice(choices), draw.choice((HAS_TOKEN, HAS_TOKEN, HAS_TOKEN | 2, 3))
            if choice not in over:
                came.append((choice.request, draw.randrange(9), flags))
            over |= {choice} if flags != HAS_TOKEN and choice.plain else set()  # no token is behind its end
        stage.pair.poll, stage.pair.in_flight = lambda *most, came=came: came, draw.choice((0, 1))
        expected, touched, plain = list[Any](), list[Choice](), list[Choice]()
        for request, token, flags in came:
            choice = request.owner
            if choice.open and choice.plain and flags == HAS_TOKEN:
                expected.append((f"plain {choice.name}", token))
                plain += [choice] if choice not in plain else []
            elif choice.open and choice.name not in finished:
                expected.append(("push", choice.name, token, flags))
                finished |= {choice.name} if flags & 0xF else set()
                expected += [("cancel", choice.name)] if choice.stops else []
                touched += [choice] if choice not in touched else []
        tokens = sum(flags & HAS_TOKEN > 0 for _, _, flags in came)
        expected += [("count", "generated_tokens", tokens)] if came else []
        for choice in touched:
            expected.append(("flush", choice.name, stage.now if choice in plain else choice.last_event))
            if not choice.last_event and choice.error is None:
                expected.append(("time_to_first_token", stage.now - 1.0))
            if choice.name in finished:
                expected.append(("request_duration", stage.now - 1.0))
        both = list(dict.fromkeys(plain + touched))
        gaps = Counter(stage.now - choice.last_event for choice in both if choice.last_event)
        expected += [("inter_token_latency", *gap) for gap in gaps.items()] + [("send",)] * len(both)
        firsts = [choice for choice in touched if not choice.last_event and choice.error is None]
        stage.timers.clear()
        stage.owner.on_space = lambda turn=turn: free_slots.append(turn)
        link._poll()
        assert (log.taken(), free_slots[-1:] == [turn]) == (expected, came != []), turn
        assert stage.polls[turn:] == [(stage.now, came != [], tokens > len(both))]
        assert stage.timers == ([turn + 1.25] if stage.pair.in_flight else [])
        assert (link._poll_timer is None) == (not stage.timers)
        assert all(choice.last_event == stage.now for choice in both)
        assert [choice.tokens for choice in choices] == [sum(e[0] == f"plain {c.name}" for e in expected) for c in choices]
        assert [choice.first_event for choice in choices] == [stage.now if choice in firsts else 0.0 for choice in choices]


def test_many_completions_are_taken_in_bounded_turns(stage: Stage, seed: int) -> None:
    """The pace gets the result of the whole step, at its end: whether it had tokens, and whether a choice had
    several."""
    draw, link, most = random.Random(seed), stage.link, engine_link.MOST_COMPLETIONS
    waiting, pair = list[Any](), stage.pair

    def poll(*limits: int) -> list[Any]:
        assert limits == (most, engine_link.MOST_FINAL)
        count = draw.randint(1, most)
        taken, waiting[:] = waiting[:count], waiting[count:]
        pair.stopped_early = bool(waiting) or draw.random() < 0.5  # at a limit, behind which there may be nothing
        return taken

    pair.poll = poll
    link._loop.call_soon = lambda call: stage.later(0.0, call)  # type: ignore[assignment]
    for size in (1, most, draw.randrange(2 * most, 4 * most)):
        for twice in (False, True):
            stage.now, began = stage.now + 1.0, stage.now
            stage.log.clear()
            stage.timers.clear()
            stage.polls.clear()
            choices = [Choice(stage.log, f"c{i}") for i in range(size)]
            for choice in choices:
                choice.last_event = began - draw.random()
            came = [(choice.request, i, HAS_TOKEN) for i, choice in enumerate(choices)]
            came += [(choices[0].request, size, HAS_TOKEN)] * twice
            waiting[:], turns = came, 0
            link._poll()
            while pair.stopped_early:
                turns += 1
                assert (stage.timers, stage.polls) == ([0.0] * turns, [])
                stage.now += 0.004
                link._poll()
            assert stage.polls == [(stage.now, True, twice)]
            assert stage.timers == [0.0] * turns + [1.25], "from now on at the pace"
            pushed = [each[1:] for each in stage.log if each[0] == "push"]
            assert pushed == [(request.owner.name, token, flags) for request, token, flags in came]


@pytest.mark.parametrize("ended", [False, True])
def test_a_step_interrupted_by_a_loss_does_not_count_for_the_next_pair(stage: Stage, ended: bool) -> None:
    """Completions of an earlier engine do not count for the next one, and do not make a choice's tokens clumped."""
    link, pair = stage.link, stage.pair
    link._loop.call_soon = lambda call: stage.later(0.0, call)  # type: ignore[assignment]
    choice = Choice(stage.log, "a")
    pair.poll, pair.stopped_early = lambda *most: [(choice.request, i, HAS_TOKEN) for i in range(2)], True
    link._poll()
    assert (stage.timers, stage.polls) == ([0.0], [])
    if ended:  # the rest of the step comes, and then the loss
        pair.stopped_early = False
        link._poll()
        assert [poll[1:] for poll in stage.polls] == [(True, True)]
    link._lose(TransportError("the card fell out"))
    stage.polls.clear()
    link.pair, pair.poll, pair.stopped_early = pair, lambda *most: [], False
    link._poll()
    assert stage.polls == [(stage.now, False, False)]


def test_a_poll_without_a_pair_or_with_a_broken_one_sets_no_timer(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    owner = Choice(stage.log, "a")
    poll, stage.pair.abandon = stage.log.noted("poll", BROKEN), lambda: [owner.request]
    stage.pair.poll = lambda *most: poll()
    reported = list[ApiError]()
    stage.owner.on_failure = reported.append
    stage.link._poll()
    assert stage.log.taken() == [("poll",), *stage.lost("a")] and [error.status for error in reported] == [503]
    assert caplog.messages == [f"queue pair lost: {BROKEN}"]
    stage.link._poll()
    stage.link._lose(LOST)
    stage.link.cancel(owner)
    stage.link.fail_all(ApiError(503, "x"))
    assert (stage.log, stage.timers, stage.link.engine_words(), stage.link.status()) == ([], [], None, "The card fell out.")
    with pytest.raises(ApiError, match="The card fell out"):
        stage.link.require()
    stage.link.pair = stage.pair
    stage.pair.poll = lambda *most: [(owner.request, 1, HAS_TOKEN)]
    owner.stops, stage.pair.cancel = True, stage.log.noted("cancel", BROKEN)  # lost in the middle of it
    stage.link._poll()
    assert stage.timers == []


@pytest.mark.parametrize("where", ["poll", "submit", "on_space"])
def test_an_unexpected_exception_is_reported_and_ends_the_polls(stage: Stage, where: str) -> None:
    """While completions are taken, while waiting requests are submitted, or while slots are granted."""
    error, link = RuntimeError("nobody foresaw this"), stage.link
    failing = stage.log.noted(where, error)
    link._watched = SimpleNamespace(failed=stage.log.noted("failed"))  # type: ignore[assignment]
    link._deferred = [(Choice(stage.log, "a"), np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    if where == "on_space":
        stage.owner.on_space = failing
    else:
        setattr(stage.pair, where, lambda *_: failing())
    link._poll()
    assert stage.log[-2:] == [(where,), ("failed", "the link to the engine", error)]
    assert stage.timers == [] and link._poll_timer is None


@pytest.mark.parametrize("error", [UNAVAILABLE, LOST])
def test_waiting_requests_get_the_reason_of_a_refusal(stage: Stage, error: Exception) -> None:
    choice = Choice(stage.log, "a")
    stage.link._deferred = [(choice, np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    stage.pair.submit = stage.log.noted("submit", error)
    stage.pair.submit = lambda *_, submit=stage.pair.submit: submit()
    stage.link._poll()
    assert stage.log == [("submit",), ("fail", "a", 503, sentence(error))] and stage.link._deferred == []


@pytest.mark.parametrize("error", [None, UNAVAILABLE, LOST, BROKEN])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_of_a_request_is_submitted_or_nothing(stage: Stage, error: Exception | None, place: int) -> None:
    log, choices = stage.log, [Choice(stage.log, name) for name in "abc"]
    work: list[Any] = [(choice, np.zeros(5 + i, np.int32), f"s{i}") for i, choice in enumerate(choices)]
    submit, stage.pair.free_slots = stage.pair.submit, 3
    stage.pair.abandon = lambda: [choice.request for choice in choices[:place]]
    if error is None:
        stage.link.submit(work)
        expected = [
            each for i, name in enumerate("abc") for each in (("submit", name, f"s{i}"), ("count", "prompt_tokens", 5 + i))
        ]
        assert log.taken() == [*expected, ("restart",)]
        assert all(choice.open and choice.request.owner is choice and choice.submitted == stage.now for choice in choices)
    else:

        def failing(prompt: Any, sampling: Any, owner: Any) -> Any:
            if owner is choices[place]:
                raise error
            return submit(prompt, sampling, owner)

        stage.pair.submit = failing
        with pytest.raises(ApiError) as caught:
            stage.link.submit(work)
        assert caught.value.__cause__ is error
        said = sentence(error)
        assert (caught.value.status, caught.value.message) == (503, said)
        happened, names = log.taken(), "abc"[:place]
        gone = stage.lost(problem=said) if error in (LOST, BROKEN) else []  # its choices get no notice: it has the answer
        restart = [("restart",)] if place else []
        assert happened[2 * place :] == [("cancel", name) for name in names] + gone + restart
        assert [choice.open for choice in choices] == [i >= place for i in range(3)]
        assert (stage.link.pair is None) == (error in (LOST, BROKEN))
    begun = error is None or place > 0
    assert stage.timers == ([POLL_S] if begun else [])
    if begun and stage.link.pair is not None and error is None:
        stage.link.submit(work)
        assert len(stage.timers) == 1, "one timer"
        stage.pair.free_slots = 2
        with pytest.raises(ApiError, match="busy: all slots are in use"):
            stage.link.submit(work)


@pytest.mark.parametrize("error", [UNAVAILABLE, ValueError("it never fits")])
def test_a_refused_request_takes_its_waiting_choices_along(stage: Stage, error: Exception) -> None:
    """If the engine takes the first prompt of two, and not the second. A request that waits for another
    request's leader stays."""
    first, behind, second, other = (Choice(stage.log, name) for name in ("first", "behind", "second", "other"))
    behind.leader, other.leader = first, Choice(stage.log, "leader of others")
    submit = stage.pair.submit

    def refusing(prompt: Any, sampling: Any, owner: Any) -> Any:
        if owner is second:
            raise error
        return submit(prompt, sampling, owner)

    stage.pair.submit = refusing
    stage.link._deferred = [(other, np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    with pytest.raises((ApiError, ValueError)):
        stage.link.submit([(choice, np.zeros(1, np.int32), None) for choice in (first, behind, second)])  # type: ignore[misc]
    assert ("cancel", "first") in stage.log and not first.open
    assert [choice for choice, _, _ in stage.link._deferred] == [other]


def test_a_loss_during_cancellation_does_not_fail_the_cancelled_choices(stage: Stage) -> None:
    first, second = (Choice(stage.log, name) for name in "ab")
    submits = iter((first.request, UNAVAILABLE))
    stage.pair.submit = lambda *_: stage.log.noted("submit", next(submits))()
    stage.pair.cancel, stage.pair.abandon = stage.log.noted("cancel", BROKEN), lambda: [first.request]
    with pytest.raises(ApiError) as caught:
        stage.link.submit([(each, np.zeros(1, np.int32), None) for each in (first, second)])
    assert caught.value.message == sentence(UNAVAILABLE)
    assert stage.log[2:] == [("submit",), ("cancel", first.request), *stage.lost(), ("restart",)]


@pytest.mark.parametrize(("led", "lives", "first"), [(False, True, True), (True, True, False), (False, False, False)])
def test_requests_that_wait_for_space_go_first(stage: Stage, led: bool, lives: bool, first: bool) -> None:
    """Not a request that waits for a leader, or was cancelled."""
    waits, comes = Choice(stage.log, "a"), Choice(stage.log, "b")
    waits.open, waits.leader = lives, comes if led else None
    stage.link._deferred = [(waits, np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    assert stage.link.free_slots() == (0 if first else 8)
    stage.link.submit([(comes, np.zeros(1, np.int32), None)])  # type: ignore[list-item]
    assert (("submit", "b", None) in stage.log) != first and len(stage.link._deferred) == 1 + first


def test_a_request_that_can_never_fit_fails_alone(stage: Stage) -> None:
    """Immediately, with the whole request; or behind a request that waits for space, without an attempt."""
    choices: list[Any] = [Choice(stage.log, name) for name in "abc"]
    first, second, third = choices
    for choice in choices:
        choice.fail = lambda error, name=choice.name: stage.log.append(("fail", name, error.status))
    submit, full = stage.pair.submit, [True]

    def submitting(prompt: Any, sampling: Any, owner: Any) -> Any:
        if owner is second:
            raise ValueError("the engine takes no grammars")
        if owner is first and full[0]:
            raise NoSpaceError("the prompt arena is full")
        return submit(prompt, sampling, owner)

    stage.pair.submit, stage.pair.free_slots, stage.pair.in_flight = submitting, 3, 0
    work: list[Any] = [(choice, np.zeros(1, np.int32), None) for choice in choices]
    with pytest.raises(ValueError, match="no grammars"):
        stage.link.submit([work[2], work[1]])
    assert ("cancel", "c") in stage.log and not third.open and stage.link._deferred == []
    stage.link.submit([work[0]])
    stage.link.submit([work[1]])
    full[0] = False
    stage.log.clear()
    stage.link._poll()
    assert ("fail", "b", 400) in stage.log and stage.link._deferred == []
    assert ("submit", "a", None) in stage.log


def test_a_link_failure_loses_each_waiting_request_once(stage: Stage) -> None:
    """A submitted request is in flight; a request that waits for a leader, or could not be sent, still waits."""
    _, led, failing, _ = choices = [Choice(stage.log, name) for name in "abcd"]
    led.leader = Choice(stage.log, "e")
    submit = stage.pair.submit

    def submitting(prompt: Any, sampling: Any, owner: Any) -> Any:
        if owner is failing:
            raise BROKEN
        return submit(prompt, sampling, owner)

    stage.pair.submit = submitting
    work: list[Any] = [(choice, np.zeros(1, np.int32), None) for choice in choices]
    stage.link._deferred = list(work)
    with pytest.raises(TransportError):
        stage.link._submit_deferred(stage.pair)  # type: ignore[arg-type]
    assert stage.link._deferred == work[1:] and ("submit", "a", None) in stage.log


def test_grammars_that_were_written_and_that_were_there_are_counted(stage: Stage) -> None:
    choice = Choice(stage.log, "a")
    choice.grammar = choice.rules = object()
    for written, counts in (((24, 40), (2, 64, 0)), ((40,), (1, 40, 1)), ((), (0, 0, 2))):
        stage.pair.submit = lambda *_, written=written, **given: SimpleNamespace(written=written)
        stage.log.clear()
        stage.link.submit([(choice, np.zeros(3, np.int32), None)])
        names = "grammar_writes", "grammar_written_bytes", "grammar_hits"
        counted = [("count", "prompt_tokens", 3), *(("count", *each) for each in zip(names, counts, strict=True))]
        assert [each for each in stage.log if each[0] == "count"] == counted


def test_a_request_that_waits_for_arena_space_is_not_overtaken(stage: Stage) -> None:
    """The first lacks space twice; the second, which would fit, follows it; a cancelled one is left out."""
    first, second, gone = choices = [Choice(stage.log, name) for name in "abc"]
    submit, left, submitted = stage.pair.submit, [2], list[Any]()

    def full(prompt: Any, sampling: Any, owner: Any) -> Any:
        if owner is first and left[0]:
            left[0] -= 1
            raise NoSpaceError("the prompt arena is full")
        submitted.append(owner)
        return submit(prompt, sampling, owner)

    stage.pair.submit, stage.pair.free_slots, stage.pair.in_flight = full, 3, 0
    for choice in choices:
        stage.link.submit([(choice, np.zeros(1, np.int32), None)])
    assert (submitted, len(stage.timers)) == ([], 1)
    with pytest.raises(ApiError, match="all slots are in use"):
        stage.link.submit([(first, np.zeros(1, np.int32), None)])
    gone.open = False
    stage.link._poll()
    assert submitted == []
    assert len(stage.timers) == 2, "it looks again"
    stage.link._poll()
    assert submitted == [first, second]


def test_status_and_words_are_those_of_the_engine(stage: Stage) -> None:
    link, transport = stage.link, stage.pair.transport
    assert (link.status(), link.require(), link.engine_words()) == (None, stage.pair, [1, 2])
    transport.read_engine_state = lambda: STATE_DRAINING
    assert link.status() == "The engine is draining."
    with pytest.raises(ApiError, match="The engine is draining"):
        link.require()
    assert stage.log == []
    for name, call in (("read_engine_state", link.status), ("read_engine", link.engine_words)):
        link.pair = stage.pair
        setattr(transport, name, stage.log.noted(name, BROKEN))
        assert call() == ("The card fell out." if name == "read_engine_state" else None)
        assert stage.log.taken() == [(name,), *stage.lost()]
        assert link.pair is None


def test_requests_in_flight_are_cancelled_and_fail_together(stage: Stage) -> None:
    choices = [Choice(stage.log, name) for name in "ab"]
    never = Choice(stage.log, "never submitted")
    never.request = None
    stage.link.cancel(never)
    stage.pair.live = lambda: [choice.request for choice in choices]
    error, reported = ApiError(503, "x"), list[ApiError]()
    stage.owner.on_failure = reported.append
    stage.owner.fail_all(error)
    assert reported == [error]  # for requests that wait for a slot
    assert stage.log.taken() == [("cancel", "a"), ("fail", "a", 503, "x"), ("cancel", "b"), ("fail", "b", 503, "x")]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no engine"), "No engine."),
        (BROKEN, "The card fell out."),
        (OSError("x. "), "X. ."),
        (TransportError("Odd."), "Odd."),
    ],
)
def test_problems_are_sentences(error: Exception, text: str) -> None:
    assert sentence(error) == text


class Sleep:
    """An awaitable that passes its length to the driver of the coroutine."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Any:
        yield self.seconds


async def at_once(call: Any) -> Any:
    return call()


@pytest.fixture
def driven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(engine_link, "asyncio", SimpleNamespace(sleep=Sleep, to_thread=at_once))
    return stage


def test_the_keeper_connects_refreshes_and_connects_again(driven: Stage, caplog: pytest.LogCaptureFixture) -> None:
    link, log, pair = driven.link, driven.log, driven.pair
    caplog.set_level("INFO", "blinkpy.frontend")
    link.pair = None
    keeper = link._keep_connected()
    for error in (LOST, LOST, LayoutError("another version"), OSError("x"), BROKEN):
        link._connect = log.noted("connect", error)
        assert keeper.send(None) == RECONNECT_S
        assert (log.taken(), link.status()) == ([("connect",)], sentence(error))
    said = [record.message for record in caplog.records]
    assert said == ["The engine is gone.", "Another version.", "X.", "The card fell out."], "each problem once"
    link._connect = log.noted("connect", pair)
    for lease, wait in ((2000, CHECK_S), (200, 0.05), (400, 0.1)):
        pair.facts.lease_ms = lease
        assert keeper.send(None) == pytest.approx(wait)
        if lease == 2000:
            assert log.taken() == [("connect",), ("thread.add", True, True), ("gauge", "attached", 1)]
            assert caplog.records[-1].message == "attached queue pair 2, epoch 4"
        else:
            assert log.taken() == [("refresh",), *GAUGES]
    for strays, counted in ((3, 3), (3, 0), (5, 2)):
        pair.stray_completions = strays
        caplog.clear()
        keeper.send(None)
        expected = [("count", "stray_completions", counted)] if counted else []
        assert log.taken() == [("refresh",), *GAUGES, *expected]
        stray = f"{counted} completions for slots without a request: report this bug with `blinkpy record`"
        assert [record.message for record in caplog.records] == [stray] * bool(counted)
    good, link._connect = pair.refresh, log.noted("connect", LOST)
    pair.refresh = log.noted("refresh", BROKEN)
    assert keeper.send(None) == RECONNECT_S
    assert log.taken() == [("refresh",), *driven.lost(problem=sentence(BROKEN)), ("connect",)]
    pair.refresh = good
    link._connect, pair.stray_completions = log.noted("connect", pair), 0
    assert keeper.send(None) == pytest.approx(0.1)
    pair.stray_completions = 1  # counted from 0 again
    keeper.send(None)
    assert ("count", "stray_completions", 1) in log.taken()
    link.pair = None  # lost by somebody else meanwhile
    keeper.send(None)
    assert log.taken()[0] == ("connect",)
    keeper.close()


def test_what_the_link_thread_finds_is_handled_on_the_loop(stage: Stage) -> None:
    """Once, for the pair that it found it of, and not at all once the loop is closed."""
    calls, link = list[Any](), stage.link
    link._loop = SimpleNamespace(call_soon_threadsafe=lambda *call: calls.append(call))  # type: ignore[assignment]
    link._on_loss(stage.pair, LOST)
    assert (stage.log, link.pair) == ([], stage.pair), "nothing happens in the link thread"
    ((call, *arguments),) = calls
    call(SimpleNamespace(), LOST)
    assert stage.log == [], "an earlier pair's loss is none of this one's"
    call(*arguments)
    assert (stage.log.taken(), link.pair) == (stage.lost(), None)
    call(*arguments)
    assert stage.log == []

    def closed(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    link._loop = SimpleNamespace(call_soon_threadsafe=closed)  # type: ignore[assignment]
    link._on_loss(stage.pair, LOST)


def test_the_keeper_starts_on_the_running_loop(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the link thread, whose end by an exception ends the worker."""
    reported, loop, started = list[Any](), SimpleNamespace(), list[str]()
    loop.call_soon_threadsafe = lambda *call: reported.append(call)
    watched = SimpleNamespace(start=lambda name, work: (work and work.close(), started.append(name)), failed="failed")
    for module in (engine_link, engines, moves):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    stage.owner.start(watched)
    assert (stage.link._loop, started) == (loop, ["the report of progress", "the link to the engine"])
    assert stage.log == [("thread.start",)]
    stage.thread.on_failure(LOST)
    assert reported == [("failed", "the link thread", LOST)]
    loop.call_soon_threadsafe = lambda *call: (_ for _ in ()).throw(RuntimeError("Event loop is closed"))
    stage.thread.on_failure(LOST)


def test_waiting_for_a_connection_ends_with_it_or_in_time(driven: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "asyncio", SimpleNamespace(sleep=Sleep))
    monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=lambda: driven.now))
    for comes, outcome, sleeps in ((True, True, 0), (False, False, 3)):
        driven.link.pair = driven.pair if comes else None
        waiting, slept = driven.owner.connected(3.0), 0
        with pytest.raises(StopIteration) as end:
            while True:
                assert waiting.send(None) == CONNECT_POLL_S
                slept += 1
                driven.now += 1.0
        assert (end.value.value, slept) == (outcome, sleeps)


def test_closing_ends_what_runs_and_gives_the_pair_up(stage: Stage) -> None:
    choice = Choice(stage.log, "a")
    stage.pair.live = lambda: [choice.request]
    for attached in (True, False):
        stage.link._poll_timer = stage.later(1, stage.link._poll) if attached else None
        stage.owner.close()
        ended: list[tuple] = []
        assert stage.link.pair is None
        if attached:
            reported = ("fail", "a", 503, "The server is shutting down; try again.")
            ended += [("cancel", "a"), reported, ("timer.cancel",), ("thread.remove", True), ("pair.close",), *DETACHED]
        assert stage.log.taken() == [*ended, ("thread.close",)]


def test_a_link_without_a_pair_has_no_free_slot(stage: Stage) -> None:
    stage.link.pair = None
    assert stage.link.free_slots() == 0


def test_held_requests_fail_before_the_loss_is_announced(stage: Stage) -> None:
    deferred: Any = Choice(stage.log, "held")
    stage.link._deferred = [(deferred, np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    stage.owner.on_failure = lambda error: stage.log.append(("told", len(stage.link._deferred)))
    stage.owner.fail_all(ApiError(503, "x"))
    assert stage.log == [("fail", "held", 503, "x"), ("told", 0)]


def test_readiness_needs_an_engine_that_serves_and_proof_of_life(stage: Stage) -> None:
    for problem in (None, "The queue pair is silent."):
        stage.thread.problem_of = stage.log.noted("problem_of", problem)
        assert stage.link.readiness() == stage.owner.readiness() == problem
    assert stage.log == [("problem_of", stage.pair)] * 4
    stage.pair.transport.read_engine_state = lambda: STATE_DRAINING
    assert stage.link.readiness() == "The engine is draining.", "what the engine says of itself comes first"
    stage.link.pair = None
    assert stage.link.readiness() == "The engine is not connected yet."


def test_a_loss_is_announced_after_all_requests_have_failed(stage: Stage) -> None:
    """At each notification, all requests have failed, in flight or waiting."""
    flying, deferred = Choice(stage.log, "flying"), Choice(stage.log, "held")
    stage.pair.abandon = lambda: [flying.request]
    stage.link._deferred = [(deferred, np.zeros(1, np.int32), None)]  # type: ignore[list-item]
    stage.owner.on_failure = stage.log.noted("told")
    stage.link._lose(LOST)
    assert [each[:2] for each in stage.log[-3:]] == [("fail", "flying"), ("fail", "held"), ("told", stage.log[-1][1])]


def test_the_log_names_one_of_several_links(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label, begin in (("engine 2", "engine 2: queue pair lost"), ("", "queue pair lost")):
        stage.owner.several = bool(label)
        link: Any = EngineLink(stage.owner, 0, EngineEntry("2", stage.log.noted("connect")))
        link.pair = stage.pair
        link._lose(LOST)
        assert caplog.messages[-1] == f"{begin}: {LOST}"
        keeper = link._keep_connected()
        link._connect = stage.log.noted("connect", LayoutError(f"version {len(label)}"))
        monkeypatch.setattr(engine_link, "asyncio", SimpleNamespace(sleep=Sleep, to_thread=at_once))
        keeper.send(None)
        keeper.close()
        assert caplog.messages[-1] == f"{label}{': ' if label else ''}Version {len(label)}."
