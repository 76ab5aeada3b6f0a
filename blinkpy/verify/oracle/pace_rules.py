"""Paced steps.

R17. With a TPOT target for its class, a request has a pace of 31/32 of the target; without a target the pace
is 0. After R9, the next step is held, and R10 to R16 wait for a later turn, if all of these conditions hold:
the command is COMMAND_RUN; no request waits; some running request does not stall, and each such request lacks
one token and has generated one; every such request would be in time. It is in time if a step that began now
ended less than a pace after the last step, and less than n paces after its first generated token. Here n is
its number of generated tokens. The expected duration of a step is taken from the last step in which all rows
decoded: the time between the turns that plan and commit it. The estimate falls by at most an eighth per step
(rounded down), and is at most the longer pace, that of best effort. Before the first such step, no step is
held.
"""

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
