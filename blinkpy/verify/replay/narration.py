"""A replay as a terminal shows it: events as they happen, turns that differ."""

from collections.abc import Iterator

from blinkpy.kv.state import State
from blinkpy.verify.replay.replay_options import ReplayOptions
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.replay.request_events import EventTracer
from blinkpy.verify.replay.turn_records import Turn

MOST_DIFFERENCES = 10  # maximum turns shown with their differences; others are counted


def narrate(replay: Replay, options: ReplayOptions) -> Iterator[tuple[Turn, bool]]:
    """Run a replay and print what the options ask for. Yields each turn, and whether it decided differently than recorded."""
    tracer, different, begin_ns = EventTracer(replay.limits, replay.state), 0, replay.turns[0].now_ns if replay.turns else 0
    for turn, differences in replay.run():
        for event in () if replay.failed else tracer.events_of(turn):
            if options.trace and options.step in (-1, turn.number) and options.request in (-1, event.request):
                at_ms, who = (turn.now_ns - begin_ns) / 1e6, f"#{event.request}" if event.request >= 0 else ""
                print(f"{at_ms:12.3f} ms  turn {turn.number:<8} {who:>8}  {event.kind:<9} {event.text}")
        if options.step == turn.number:
            _print_turn(turn, replay.state)
        different += bool(differences)
        if differences and different <= MOST_DIFFERENCES:
            print(f"turn {turn.number} differs: {'; '.join(differences)}")
        yield turn, bool(differences)


def _print_turn(turn: Turn, state: State) -> None:
    """One turn in full."""
    requests = state.requests
    print(f"turn {turn.number}: bucket {turn.bucket}, {turn.free} pages free, {turn.cached} cached")
    for pair, (heartbeat, claim, head, doorbell) in enumerate(turn.inbox.tolist()):
        print(f"  queue pair {pair}: heartbeat {heartbeat}, claim {claim}, completions read {head:#x}, doorbell {doorbell:#x}")
    for slot, tokens in turn.planned.tolist():
        end = requests.computed[slot] + tokens
        print(f"  row of #{requests.arrival[slot]}, slot {slot}: {tokens} tokens, up to {end} of {requests.length[slot]}")
