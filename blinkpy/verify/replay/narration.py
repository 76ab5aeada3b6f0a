"""A replay as a terminal shows it: events as they happen, turns that differ."""

from __future__ import annotations

from blinkpy.kv.state import State
from blinkpy.verify.replay.replay_options import ReplayOptions
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.replay.request_events import Event, EventTracer
from blinkpy.verify.replay.turn_records import Turn

MOST_DIFFERENCES = 10  # turns that are shown with what differs; others are counted


class Narration:
    """Prints what the options ask for. Made before the replay runs; call `narrate` after each turn.

    different: turns so far that decided differently from the recording.
    """

    def __init__(self, replay: Replay, options: ReplayOptions):
        self.different = 0
        self._state, self._options, self._begin_ns = replay.state, options, replay.turns[0].now_ns if replay.turns else 0
        self._tracer = EventTracer(replay.limits, replay.state)

    def narrate(self, turn: Turn, differences: list[str]) -> None:
        options = self._options
        for event in self._tracer.events_of(turn):
            if options.trace and options.step in (-1, turn.number) and options.request in (-1, event.request):
                self._print_event(turn, event)
        if options.step == turn.number:
            _print_turn(turn, self._state)
        if differences:
            self.different += 1
            if self.different <= MOST_DIFFERENCES:
                print(f"turn {turn.number} differs: {'; '.join(differences)}")

    def _print_event(self, turn: Turn, event: Event) -> None:
        who = f"#{event.request}" if event.request >= 0 else ""
        at_ms = (turn.now_ns - self._begin_ns) / 1e6
        print(f"{at_ms:12.3f} ms  turn {turn.number:<8} {who:>8}  {event.kind:<9} {event.text}")


def _print_turn(turn: Turn, state: State) -> None:
    """One turn in full."""
    requests = state.requests
    print(f"turn {turn.number}: bucket {turn.bucket}, {turn.free} pages free, {turn.cached} cached")
    for pair, (heartbeat, claim, head, doorbell) in enumerate(turn.inbox.tolist()):
        print(f"  queue pair {pair}: heartbeat {heartbeat}, claim {claim}, completions read {head:#x}, doorbell {doorbell:#x}")
    for slot, tokens in turn.planned.tolist():
        end = requests.computed[slot] + tokens
        print(f"  row of #{requests.arrival[slot]}, slot {slot}: {tokens} tokens, up to {end} of {requests.length[slot]}")
