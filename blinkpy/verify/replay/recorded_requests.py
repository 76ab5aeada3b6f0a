"""The requests of a recording as a workload for `blinkpy check`: how long they were, and when they came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.verify.replay.call_records import Call

HEAD = "arrival_s,prompt_tokens,generated_tokens,max_tokens,priority"


@dataclass
class Seen:
    """One request. generated: tokens so far; of one that ends and makes place at once, all but the last."""

    arrived_ns: int
    prompt: int
    max_tokens: int
    priority: int
    generated: int = 0


class RecordedRequests:
    """Collects the requests that are accepted during a replay: call `take` after each call. state: as before the first one."""

    def __init__(self, state: State) -> None:
        self._arrivals = int(state.counts[S.ARRIVALS])
        self.seen: dict[int, Seen] = {}

    def take(self, call: Call, state: State) -> None:
        requests = state.requests
        first = int(state.counts[S.ARRIVALS]) - self._accepted(state)
        for slot in np.flatnonzero(requests.request_id).tolist():
            request = int(requests.arrival[slot])
            if request not in self.seen and request >= first and requests.status[slot] not in (S.EMPTY, S.FINISHING):
                self.seen[request] = Seen(
                    call.now_ns,
                    int(requests.prompt_length[slot]),
                    int(requests.entry[slot, WORD_MAX_TOKENS]),
                    int(requests.entry[slot, WORD_PRIORITY]),
                )
            if request in self.seen:
                self.seen[request].generated = int(requests.length[slot] - requests.prompt_length[slot])

    def _accepted(self, state: State) -> int:
        """How many requests were accepted in the last call."""
        before, self._arrivals = self._arrivals, int(state.counts[S.ARRIVALS])
        return self._arrivals - before

    def write(self, path: Path) -> int:
        """Write the CSV file; returns the number of requests. Raises OSError. RecordedRequests without a token are left out."""
        chosen = [seen for _, seen in sorted(self.seen.items()) if seen.generated > 0]
        first = chosen[0].arrived_ns if chosen else 0
        lines = [
            f"{(seen.arrived_ns - first) / 1e9:.6f},{seen.prompt},{seen.generated},{seen.max_tokens},{seen.priority}"
            for seen in chosen
        ]
        path.write_text("\n".join([HEAD, *lines]) + "\n")
        return len(lines)
