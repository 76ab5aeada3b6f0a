"""Completions of all streams: when to poll for them, and passing them to generations."""

from collections import deque
from collections.abc import Callable

from blinkpy.dpu.generation import Generation, Sink
from blinkpy.dpu.link.queue_pair import CompletionEvent
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.words import FINISH_MASK, HAS_TOKEN, WAS_DRAFTED, WAS_PREDICTED

POLL_S = 0.001  # minimum wait
SPARE_S = 2 * POLL_S  # timers may be late by POLL_S, and steps differ slightly
STEPS = 8  # number of last steps that count
EARLY_SHARE = 0.9  # factor for an uncertain length
QUIET_LIMIT_S = 0.05  # maximum wait


class PollPace:
    """When to poll for completions: most steps cost two or three polls, and a token waits for half a millisecond.

    Steps take about equally long, so a wait is slightly shorter than the shortest of the last steps. A longer step then costs a
    few empty polls, but a decode step after a mixed step does not wait. An empty poll directly before the poll that finds a
    step shows the step's length. Without an empty poll, the step ended at an unknown earlier time, and counts as shorter. If
    one poll finds two tokens of a request, steps became much shorter, and the next polls come as early as possible.
    """

    def __init__(self) -> None:
        self._lengths = deque([0.0], STEPS)  # lengths of the last steps, s; 0: unknown
        self._last_step = 0.0  # time of the last completions, s
        self._found = False  # the last poll found completions

    def restart(self) -> None:
        """Forget the length of a step: steps resume after a pause."""
        self._lengths.append(0.0)

    def delay(self, now: float, found: bool, clumped: bool) -> float:
        """Seconds until the next poll.

        now: time of this poll, s of the monotonic clock.
        found: it found completions.
        clumped: it found several completions of one request.
        """
        delay = POLL_S
        if found:
            length = now - self._last_step
            self._lengths.append(0.0 if clumped else EARLY_SHARE * length if self._found else length)
            delay = min(max(POLL_S, min(self._lengths) - SPARE_S), QUIET_LIMIT_S)
            self._last_step = now
        self._found = found
        return delay


# Flags of a token with nothing else.
PLAIN_TOKENS = HAS_TOKEN, HAS_TOKEN | WAS_DRAFTED, HAS_TOKEN | WAS_DRAFTED | WAS_PREDICTED


def feed(
    completions: list[CompletionEvent], now: float, began: float, metrics: Metrics, cancel: Callable[[Generation], None]
) -> bool:
    """Pass completions to their generations, then send the text of all.

    now: the time of this call, s of the monotonic clock.
    began: the time of the first call for these completions' step, s.
    cancel: asks the engine to end a generation, after a stop string.
    Returns whether a generation got several completions since `began`.
    """
    touched, sinks, tokens = list[Generation](), list[Sink](), 0
    before: dict[float, int] = {}  # number of generations by the time of their last event, mostly that of one step
    for request, token, flags in completions:
        generation: Generation = request.owner
        plain = generation.plain
        if flags in PLAIN_TOKENS and plain is not None and generation.open:  # the common case
            if flags != HAS_TOKEN:
                generation.drafted += 1
                generation.predicted += flags & WAS_PREDICTED != 0
            tokens += 1
            generation.tokens += 1
            plain.push(token)
            last = generation.last_event
            if last != now:
                generation.last_event = now
                before[last] = before.get(last, 0) + 1
                sinks.append(generation.sink)
            continue
        if generation.scoring and flags & HAS_TOKEN:
            generation.push_score()
            continue
        if flags & HAS_TOKEN:
            tokens += 1
        if not generation.open or generation.finish_reason is not None:
            continue  # generated before the engine read the cancel word
        if generation.push(token, flags):
            cancel(generation)
        if not generation.touched:
            generation.touched = True
            touched.append(generation)
    metrics.count("generated_tokens", tokens)
    for generation in touched:
        generation.touched = False
        last = generation.last_event
        generation.flush()
        generation.last_event = now
        if last != now:  # otherwise its plain tokens added it
            sinks.append(generation.sink)
        if last and last != now:
            before[last] = before.get(last, 0) + 1
        elif not last and generation.error is None:
            generation.first_event = now
            metrics.time_to_first_token.observe(now - generation.arrival)
        if generation.finish_reason is not None:
            metrics.request_duration.observe(now - generation.arrival)
            if generation.prediction is not None:
                metrics.count("prediction_tokens", len(generation.prediction))
                metrics.count("accepted_prediction_tokens", generation.predicted)
    for last, times in before.items():
        metrics.inter_token_latency.observe(now - last, times)
    # All texts first, then all writes: if they alternate, Python and the kernel evict each other's cache
    # lines.
    for sink in sinks:
        sink.send()
    return tokens > len(sinks) or max(before, default=0.0) >= began


def note_flights(completions: list[CompletionEvent]) -> int:
    """Record output in the generations' flights, for a move to another engine. Every generation must have a
    flight. Returns the tokens that the ended requests had outstanding in this engine.
    """
    ended = 0
    for request, token, flags in completions:
        flight = request.owner.flight
        if flags & HAS_TOKEN and flight.scores_due:
            flight.scores_due -= 1
        elif flags & HAS_TOKEN:
            flight.output.append(token)
        if flags & FINISH_MASK:
            ended += flight.cost
    return ended
