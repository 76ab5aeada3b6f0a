"""Whether a step is held, so that tokens come at the pace that was asked for: rule R17."""

from blinkpy.queues import words as W
from blinkpy.verify.oracle.oracle_state import OracleState


def time_step(state: OracleState, now_ns: int) -> None:
    """R17: what a step tells about the next one, and when its tokens came; before the turn's time is that of this turn."""
    longest = state.limits.best_effort_pace_ns
    if not longest or not state.rows:
        return
    state.tokens_ns = now_ns
    for request, _, emits in state.rows:
        if emits and len(request.tokens) == request.prompt_length:
            request.first_token_ns = now_ns
    if all(row.request.missing == 1 for row in state.rows):
        state.step_ns = min(longest, max(now_ns - state.now_ns, state.step_ns - state.step_ns // 8))


def holds(state: OracleState, command: int) -> bool:
    """R17: whether nobody needs the next step yet."""
    able = [r for r in state.running if not r.stalled]
    held = bool(state.step_ns and able) and command == W.COMMAND_RUN and not state.waiting
    held = held and all(len(r.tokens) > r.prompt_length and r.missing == 1 for r in able)
    ends = state.now_ns + state.step_ns  # of a step that began now
    for r in able if held else []:
        pace = state.limits.best_effort_pace_ns if r.best_effort else state.limits.pace_ns
        due = r.first_token_ns + pace * (len(r.tokens) - r.prompt_length)
        held = held and ends < min(due, state.tokens_ns + pace)
    if held:
        state.held_since = state.held_since or state.now_ns
    elif state.held_since:
        state.counters["paced_ns"] += state.now_ns - state.held_since
        state.held_since = 0
    return held
