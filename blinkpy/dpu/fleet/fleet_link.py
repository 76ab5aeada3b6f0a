"""The link to one engine of several: an EngineLink that keeps what another engine needs to go on."""

import time
from collections.abc import Callable, Sequence

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.engine_link import NOT_YET, EngineLink, Submission
from blinkpy.dpu.engine_starts import EngineStarts
from blinkpy.dpu.fleet.placement import EngineLoad
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.link.link_thread import LinkThread
from blinkpy.dpu.link.queue_pair import CompletionEvent, EngineLostError, QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.completion import FINISH_MASK, HAS_TOKEN
from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.words import COUNTER, GAUGE

LOAD_S = 0.01  # for which gauges count as new

ACCEPTED = COUNTER["requests_accepted"]
LEAVES = "The engine is leaving."

GaugeChange = Callable[[int, str, float], None]
Lost = Callable[[Sequence[Generation], ApiError], None]


class FleetLink(EngineLink):
    """index: of the engine, which is called label. on_lost: who gets generations that this engine can't go on with; on_gauge:
    who hears of this link's gauges. leaving: nothing is submitted, and nobody connects, any more; vacant: nor is there an
    engine."""

    def __init__(
        self,
        index: int,
        label: str,
        connect: Callable[[], QueuePair],
        metrics: Metrics,
        starts: EngineStarts | None,
        on_lost: Lost,
        on_gauge: GaugeChange,
        thread: LinkThread | None = None,
    ):
        super().__init__(connect, metrics, starts, f"engine {label}", thread, shared=True)
        self.index, self.label = index, label
        self.leaving = self.vacant = False
        self._on_lost, self._on_gauge = on_lost, on_gauge
        self._words, self._read_at = [0] * BLOCK_WORDS, 0.0  # the engine's block, and when it was read, s
        self._outstanding = 0  # tokens of prompts and outputs that this engine still has to compute for this front end
        self._unseen = 0  # tokens of prompts that it got since it accepted any

    def status(self) -> str | None:
        return LEAVES if self.leaving else super().status()

    def is_idle(self) -> bool:
        """Whether nobody's request is there."""
        return not self._held and (self.pair is None or not self.pair.in_flight)

    def vacate(self) -> None:
        """Let the engine go: it is idle."""
        self.leaving = self.vacant = True
        self._connect = _nowhere
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        if self.pair is not None:
            self._drop(self.pair)
            self._gauge("attached", 0)

    def occupy(self, label: str, connect: Callable[[], QueuePair], starts: EngineStarts | None) -> None:
        """Connect to this engine from now on: the place was vacant."""
        self.label, self._connect, self._starts = label, connect, starts
        self._log_prefix, self._problem = f"engine {label}: ", NOT_YET
        self.leaving = self.vacant = False

    async def _try_connect(self) -> QueuePair | None:
        if self.leaving:
            return None
        connect = self._connect
        pair = await super()._try_connect()
        if pair is not None and self._connect is not connect:  # the engine was let go meanwhile
            self._drop(pair)
            self._gauge("attached", 0)
            return None
        return pair

    def spare(self) -> int:
        """Slots that nobody has or waits for."""
        return 0 if self.pair is None else self.pair.free_slots - len(self._held)

    def load(self) -> EngineLoad:
        """Of an engine that takes requests."""
        now, spare = time.monotonic(), self.spare()
        if now - self._read_at > LOAD_S:
            before = self._words[ACCEPTED]
            self._words, self._read_at = self.engine_words() or [0] * BLOCK_WORDS, now
            if self._words[ACCEPTED] != before:
                self._unseen = 0
        words = self._words
        free, running = words[GAUGE["pages_free"]] + words[GAUGE["pages_cached"]], words[GAUGE["requests_running"]]
        prompts, accepted = words[COUNTER["prompt_tokens"]], words[ACCEPTED]
        waiting = words[GAUGE["requests_waiting"]] * prompts // max(1, accepted)  # as long as the others, on average
        return EngineLoad(self.index, spare, waiting, running, free, self._outstanding, self._unseen, spare > 0)

    def _hand_over(self, pair: QueuePair, submission: Submission) -> None:
        generation, prompt, sampling = submission
        before = generation.submitted
        super()._hand_over(pair, submission)
        flight = generation.flight
        if flight is None:
            return
        generation.submitted = before or generation.submitted  # its phases are counted from its first engine on
        flight.engine, flight.cost = self.index, len(prompt) + sampling.max_tokens
        flight.scores_due = 0
        if generation.scoring and generation.scores is not None:
            flight.scores_due = len(prompt) - len(generation.scores.entries)
        self._outstanding += flight.cost
        self._unseen += len(prompt)

    def _feed(self, completions: list[CompletionEvent], now: float, began: float) -> bool:
        for request, token, flags in completions:
            flight = request.owner.flight
            if flags & HAS_TOKEN and flight.scores_due:
                flight.scores_due -= 1
            elif flags & HAS_TOKEN:
                flight.output.append(token)
            if flags & FINISH_MASK:
                self._outstanding -= flight.cost
        return super()._feed(completions, now, began)

    def _give_up(self, generations: list[Generation], error: ApiError) -> None:
        if self.pair is None:
            self._outstanding = self._unseen = 0
            self._read_at = 0.0
        self._on_lost([generation for generation in generations if generation.open], error)

    def _gauge(self, name: str, value: float) -> None:
        self._on_gauge(self.index, name, value)
        if name == "attached" and not value:
            self._on_gauge(self.index, "slots", 0)
            self._on_gauge(self.index, "requests_in_flight", 0)


def _nowhere() -> QueuePair:
    raise EngineLostError("there is no engine")
