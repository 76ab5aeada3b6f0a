"""Passes completions to generations: the work per token that all streams share."""

from collections.abc import Callable

from blinkpy.dpu.generation import Generation, Sink
from blinkpy.dpu.link.queue_pair import CompletionEvent
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.words import FINISH_MASK, HAS_TOKEN, WAS_DRAFTED

PLAIN_TOKENS = HAS_TOKEN, HAS_TOKEN | WAS_DRAFTED  # flags of a token with nothing else


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
