"""Placement: the choice of an engine for each request of a worker."""

import logging
import random
import time
import traceback
from collections.abc import Callable, Sequence

from blinkpy.dpu.fleet.engine_load import EngineLoad
from blinkpy.dpu.fleet.placement_rules import PlacedRequest, Rule, least_loaded, prefix
from blinkpy.dpu.fleet.prefix_record import PrefixRecord
from blinkpy.queues.words import Int32

__all__ = ["EngineLoad", "Placement"]

RECORD_PAGES = 1 << 16
LOG_S = 60.0  # minimum time between two log lines about a failing rule

logger = logging.getLogger("blinkpy.frontend")


class Placement:
    """Chooses engines for one worker.

    engines: their number.
    page_size: tokens.
    rule: of placement_rules, or a user's.
    record_pages: pages recorded per engine; ideally as many as the engine has.
    seed: of the random draws.
    on_fault: called if the rule raises or returns no engine that accepts requests; the least loaded engine is
        then chosen.
    faults: number of these calls.
    """

    def __init__(
        self,
        engines: int,
        page_size: int,
        *,
        rule: Rule = prefix,
        record_pages: int = RECORD_PAGES,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[], None] = lambda: None,
    ):
        self._rule, self._clock, self._engines = rule, clock, engines
        self._record = PrefixRecord(engines, page_size, record_pages)
        self._draw = random.Random(seed).getrandbits
        self._number = 0
        self._logged: float | None = None
        self.faults, self._on_fault = 0, on_fault

    def grow(self, engines: int) -> None:
        """Raise the number of engines."""
        self._engines = engines
        self._record.grow(engines)

    def choose(self, prompt: Int32, salt: int, loads: Sequence[EngineLoad]) -> int | None:
        """The index of the engine for a prompt, int32 [n]; None if no engine accepts requests. salt: of the
        prefix cache, in [0, 2**63).
        """
        able = [load for load in loads if load.accepts]
        if len(able) < 2:
            return able[0].index if able else None
        request = PlacedRequest(self._number, len(prompt), self._record.match(prompt, salt), salt, self._draw(32))
        self._number += 1
        try:
            chosen = self._rule(request, able)
            for load in able:
                if chosen is load:
                    return load.index
            self._fail(f"gave {chosen!r:.80}, which is not one of the engines")
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._fail(f"({frame.filename}, line {frame.lineno}) {traceback.format_exception_only(error)[-1].strip()}")
        return least_loaded(request, able).index

    def sent(self, engine: int, prompt: Int32, salt: int) -> None:
        """Record that a prompt, int32 [n], was sent to an engine, which may then have its pages cached."""
        if self._engines > 1:
            self._record.add(engine, prompt, salt)

    def forget(self, engine: int) -> None:
        """Clear the record of an engine that was restarted with an empty prefix cache."""
        self._record.forget(engine)

    def _fail(self, what: str) -> None:
        self.faults += 1
        self._on_fault()
        now = self._clock()
        if self._logged is None or now - self._logged >= LOG_S:
            self._logged = now
            logger.error("placement %s; %d requests so far were sent to the least loaded engine instead", what, self.faults)
