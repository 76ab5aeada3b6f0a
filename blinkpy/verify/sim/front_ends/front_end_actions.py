"""Front ends of a simulation, as device code: they follow blinkpy.queues, from a few draws in each turn, and sometimes don't.

What a front end writes goes through its wire; when it crashes, a part of what is under way still arrives.
"""

from __future__ import annotations

from blinkpy.device.portable import device
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.verify.sim.draws import chance, draw, start_draws
from blinkpy.verify.sim.events import EVENT_PACE, EVENT_RETURN, EVENT_SILENT, note
from blinkpy.verify.sim.front_ends.completion_reader import poll
from blinkpy.verify.sim.front_ends.pair_ownership import beat, claim_pair, owns, settle
from blinkpy.verify.sim.front_ends.protocol_faults import break_protocol, crash, late_write
from blinkpy.verify.sim.front_ends.submissions import cancel, submit
from blinkpy.verify.sim.front_ends.wire import deliver, wire_room

FAST, SLOW, STUCK, PACES = range(4)  # Fronts.pace: how a reader reads
LONGEST_SILENCE = 60  # turns; a lease is 20


@device
def front_turn(limits, queues, sim, turn, pair, command):
    """What one front end does in one turn. command: COMMAND_*, of the host. Returns a fault, or 0."""
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    start_draws(draws, sim.seed, turn, pair)
    calm = turn >= sim.turns
    muted = calm or sim.muted[turn, pair] != 0
    if not muted and chance(draws, odds.late):
        late_write(limits, queues, sim, turn, pair)
    if fronts.alive[pair] == 0:
        if not calm and (muted or not chance(draws, odds.comeback)):
            return 0
        fronts.alive[pair] = 1
        note(sim, turn, pair, EVENT_RETURN, 0, 0)
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.silent[pair] > 0 and not calm:
        fronts.silent[pair] -= 1
        return 0
    fault = 0
    if wire_room(fronts, pair) > 8:
        beat(fronts, pair)
    if fronts.epoch[pair] == 0:
        settle(limits, queues, sim, turn, pair)
    elif not owns(queues, pair, fronts.epoch[pair]) and (muted or chance(draws, odds.notice)):
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.epoch[pair] > 0 and wire_room(fronts, pair) > 16:
        if not muted:
            act(limits, queues, sim, turn, pair)
        elif calm and command != COMMAND_RUN:  # it has not heard of it yet
            submit(limits, queues, sim, turn, pair)
        if fronts.alive[pair] == 0:
            return 0
        most = limits.cq_entries
        if fronts.pace[pair] != FAST and not calm:
            most = draw(draws, 4) if fronts.pace[pair] == SLOW and chance(draws, 200) else 0
        fault = poll(limits, queues, fronts, pair, most)
    under_way = fronts.wire_tail[pair] - fronts.wire_head[pair]
    if not muted and chance(draws, odds.delay):
        under_way = draw(draws, under_way + 1)
    deliver(limits, queues, fronts, pair, under_way)
    return fault


@device
def act(limits, queues, sim, turn, pair):
    """What a front end that owns its pair does of its own accord."""
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    if chance(draws, odds.submit):
        for _ in range(1 + draw(draws, odds.burst)):
            if not submit(limits, queues, sim, turn, pair):
                break
    if chance(draws, odds.cancel):
        cancel(limits, sim, turn, pair)
    if chance(draws, odds.pace):
        fronts.pace[pair] = draw(draws, PACES)
        note(sim, turn, pair, EVENT_PACE, fronts.pace[pair], 0)
    if chance(draws, odds.broken):
        break_protocol(limits, sim, turn, pair)
    if chance(draws, odds.silent):
        fronts.silent[pair] = 1 + draw(draws, LONGEST_SILENCE)
        note(sim, turn, pair, EVENT_SILENT, fronts.silent[pair], 0)
    if chance(draws, odds.crash):
        crash(limits, queues, sim, turn, pair)
