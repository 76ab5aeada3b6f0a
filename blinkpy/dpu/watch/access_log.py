"""Writes one log line, metrics and an optional trace after each HTTP request. They delay no token."""

import json
import logging
import random
import re
import secrets
import time
from typing import NamedTuple, Protocol

from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.watch.log_output import ACCESS, FIELDS
from blinkpy.queues.words import EPOCH_SHIFT, POSITION_MASK

HEADER = b"x-request-id"
# Ids are logged unescaped: no character may end a line, a quoted text or a header.
ACCEPTED = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
# Ids are unique, not secret. A system call for each would cost more than the rest of a small answer.
_IDS = random.Random(secrets.token_bytes(32))


def request_id_of(headers: list[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """The request's id, and whether it comes from the client. An id that does not match ACCEPTED is
    replaced.
    """
    for name, value in headers:
        if name == HEADER and ACCEPTED.fullmatch(value):
            return value.decode(), True
    return f"{_IDS.getrandbits(96):024x}", False


class RequestPhases(NamedTuple):
    """Durations in s; None if a phase was not reached or is unknown.

    front_end: until submission to the engine, without the wait for a slot.
    queue: wait for a slot plus wait in the engine.
    prefill: until the first token.
    decode: until the last token.
    """

    front_end: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None


def phases_of(generation: Generation) -> RequestPhases:
    """The phases of a choice that has ended."""
    if not generation.submitted:
        return RequestPhases()
    front_end = generation.submitted - generation.arrival - generation.waited
    if not generation.first_event or generation.request is None:
        return RequestPhases(front_end)
    decode = generation.last_event - generation.first_event
    waited = generation.request.waited_ns
    if waited < 0:
        return RequestPhases(front_end, decode=decode)
    in_engine = generation.first_event - generation.submitted
    queue = min(waited / 1e9, in_engine)  # two clocks, one with a resolution of 1 ms
    return RequestPhases(front_end, generation.waited + queue, in_engine - queue, decode)


def ending_of(generation: Generation) -> str:
    """How a choice ended: one of blinkpy.dpu.metrics.ENDINGS."""
    return generation.finish_reason or ("error" if generation.error is not None else "abort")


SHOWN_PATH = 200  # characters
MOST_STRANGERS, SPAN_S = 600, 60.0  # log lines for clients without a key, and their period

logger = logging.getLogger(ACCESS)


class EndedRequest(Protocol):
    """An HTTP request that has ended.

    tenant: the API key's tenant.
    status: the response's status; 0 without a response.
    generations: its choices.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    client: str
    request_id: str
    tenant: Tenant
    arrival: float
    status: int
    generations: list[Generation]


class Tracer(Protocol):
    """Receives ended requests, to send spans (blinkpy.dpu.watch.traces)."""

    def request(self, request: EndedRequest, ended: float) -> None: ...


class AccessLog:
    """Logs and measures ended requests. enabled: write access lines. Lines of successful GET requests have
    level debug.
    """

    def __init__(self, metrics: Metrics, enabled: bool, tracer: Tracer | None = None):
        self._metrics, self._enabled, self._tracer = metrics, enabled, tracer
        self._span = (0.0, 0)  # start of the period, s, and lines for strangers in it

    def ended(self, request: EndedRequest, stranger: bool = False) -> None:
        """Log and measure a request that has just ended. stranger: whether it was refused because it had no valid key."""
        now = time.monotonic()
        phases = [phases_of(generation) for generation in request.generations]
        for generation, spent in zip(request.generations, phases, strict=True):
            self._measure(generation, spent)
        if self._tracer is not None and request.generations:
            self._tracer.request(request, now)
        level = logging.DEBUG if request.method in ("GET", "HEAD") and request.status < 400 else logging.INFO
        if self._enabled and logger.isEnabledFor(level) and not (stranger and self._is_too_much(now)):
            fields = {
                "request_id": request.request_id,
                "client": request.client,
                **({"tenant": request.tenant.name} if request.tenant.name else {}),
                "status": request.status,
                "ms": round((now - request.arrival) * 1e3, 1),
                **_tokens(request.generations, phases),
            }
            path = json.dumps(request.path[:SHOWN_PATH])
            logger.log(level, "%s %s", request.method, path, extra={FIELDS: fields})

    def _is_too_much(self, now: float) -> bool:
        """Count a line for a client without a key. Returns whether the period already has MOST_STRANGERS lines. The next period
        logs the number of omitted lines.
        """
        since, lines = self._span
        if now - since >= SPAN_S:
            if lines > MOST_STRANGERS:
                logger.warning("%d lines for refused clients without a key were left out", lines - MOST_STRANGERS)
            since, lines = now, 0
        self._span = since, lines + 1
        return lines >= MOST_STRANGERS

    def _measure(self, generation: Generation, spent: RequestPhases) -> None:
        metrics = self._metrics
        metrics.ending(ending_of(generation))
        for attribute, seconds in zip(("front_end_time", "queue_time", "prefill_time", "decode_time"), spent, strict=True):
            if seconds is not None:
                metrics.observe(attribute, seconds)
        if spent.prefill is not None and spent.decode is not None:
            metrics.observe("inference_time", spent.prefill + spent.decode)
        if spent.decode is not None and generation.tokens > 1:
            metrics.observe("time_per_output_token", spent.decode / (generation.tokens - 1))
        metrics.observe("prompt_length", generation.prompt_length)
        metrics.observe("output_length", generation.tokens)


def _tokens(generations: list[Generation], phases: list[RequestPhases]) -> dict[str, object]:
    """Log fields of a request with generations. Times are those of its first choice."""
    if not generations:
        return {}
    first = generations[0]
    times = zip(RequestPhases._fields, phases[0], strict=True)
    return {
        "prompt_tokens": first.prompt_length,
        "cached_tokens": first.cached_tokens,
        "generated_tokens": sum(generation.tokens for generation in generations),
        "choices": len(generations),
        "ended": ",".join(sorted({ending_of(generation) for generation in generations})),
        "engine_request": _engine_id(first),
        **({"moves": moves} if (moves := sum(one.flight.moves for one in generations if one.flight is not None)) else {}),
        **{f"{name}_ms": round(seconds * 1e3, 1) for name, seconds in times if seconds is not None},
    }


def _engine_id(generation: Generation) -> str:
    """The request's id in recordings: epoch and number within the worker's queue pair."""
    request_id = 0 if generation.request is None else generation.request.request_id
    return f"{request_id >> EPOCH_SHIFT}:{request_id & POSITION_MASK}"
