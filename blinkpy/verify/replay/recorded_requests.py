"""The requests of a recording as a workload for `blinkpy check`: how long they were, and when they came."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.verify.replay.turn_records import Turn

HEAD = "arrival_s,prompt_tokens,generated_tokens,max_tokens,priority"


@dataclass(order=True)
class Seen:
    """One request. generated: tokens so far; if it ended and its slot was reused in the same turn, without the
    last.
    """

    arrival: int  # its number
    arrived_ns: int
    prompt: int
    max_tokens: int
    priority: int
    generated: int = 0


class RecordedRequests:
    """Collects the requests that are accepted during a replay: call `take` after each turn. state: as before the first one."""

    def __init__(self, state: State) -> None:
        self._first = state.counts[S.ARRIVALS]
        self._seen: dict[tuple[int, int], Seen] = {}  # by slot and id

    def take(self, turn: Turn, state: State) -> None:
        r = state.requests
        for slot in np.flatnonzero(r.request_id).tolist():
            key = slot, int(r.request_id[slot])
            if r.status[slot] in (S.WAITING, S.RUNNING) and r.arrival[slot] >= self._first and key not in self._seen:
                words = r.entry[slot, [WORD_MAX_TOKENS, WORD_PRIORITY]].tolist()
                self._seen[key] = Seen(int(r.arrival[slot]), turn.now_ns, int(r.prompt_length[slot]), *words)
            if key in self._seen:
                self._seen[key].generated = max(0, int(r.length[slot] - r.prompt_length[slot]))

    def write(self, path: Path) -> int:
        """Write the CSV file; returns the number of requests. Raises OSError. Requests without a token are left out."""
        chosen = sorted(seen for seen in self._seen.values() if seen.generated > 0)
        lines = [HEAD]
        for seen in chosen:
            arrival_s = (seen.arrived_ns - chosen[0].arrived_ns) / 1e9
            lines.append(f"{arrival_s:.6f},{seen.prompt},{seen.generated},{seen.max_tokens},{seen.priority}")
        path.write_text("\n".join(lines) + "\n")
        return len(chosen)
