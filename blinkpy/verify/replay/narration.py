"""A replay as a terminal tells it: events as they happen, calls that differ, and the verdict."""

from __future__ import annotations

from blinkpy.verify.replay.call_records import Call
from blinkpy.verify.replay.replay_options import ReplayOptions
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.replay.request_events import Event, EventTracer

MOST_DIFFERENCES = 10  # calls that are shown with what differs; others are counted


class Narration:
    """Prints what the options ask for. Made before the replay runs; call `narrate` after each call, and `verdict` at the end.

    different: calls so far that decided differently from the recording.
    """

    def __init__(self, replay: Replay, options: ReplayOptions):
        self.different = 0
        self._replay, self._options = replay, options
        self._tracer = EventTracer(replay.limits, replay.state)
        self._begin_ns = replay.calls[0].now_ns if replay.calls else 0

    @property
    def span_s(self) -> float:
        """Seconds from the first call to the last."""
        calls = self._replay.calls
        return (calls[-1].now_ns - self._begin_ns) / 1e9 if calls else 0.0

    def narrate(self, call: Call, differences: list[str]) -> None:
        options = self._options
        events = self._tracer.after(call)
        if options.trace and options.step in (-1, call.number):
            for event in events:
                if options.request in (-1, event.request):
                    self._tell_event(event)
        if options.step == call.number:
            self._tell_call(call)
        if differences:
            self.different += 1
            if self.different <= MOST_DIFFERENCES:
                print(f"call {call.number} differs: {'; '.join(differences)}")
        self._tracer.before()

    def verdict(self) -> str:
        total = len(self._replay.calls)
        if self.different:
            return f"{self.different:,} of {total:,} calls decided differently from the recording, over {self.span_s:.3f} s"
        return f"all {total:,} calls decided as recorded, over {self.span_s:.3f} s"

    def _tell_event(self, event: Event) -> None:
        who = f"#{event.request}" if event.request >= 0 else ""
        at_ms = (event.now_ns - self._begin_ns) / 1e6
        print(f"{at_ms:12.3f} ms  call {event.call:<8} {who:>8}  {event.kind:<9} {event.text}")

    def _tell_call(self, call: Call) -> None:
        """One call in full."""
        requests = self._replay.state.requests
        print(f"call {call.number}: bucket {call.bucket}, {call.free} pages free, {call.cached} cached")
        for pair, (heartbeat, claim, head, doorbell) in enumerate(call.inbox.tolist()):
            print(
                f"  queue pair {pair}: heartbeat {heartbeat}, claim {claim}, completions read {head:#x}, doorbell {doorbell:#x}"
            )
        for slot, tokens in call.planned.tolist():
            request, end, length = int(requests.arrival[slot]), int(requests.computed[slot]) + tokens, int(requests.length[slot])
            print(f"  row of #{request}, slot {slot}: {tokens} tokens, up to {end} of {length}")
