"""One round of a simulation: check the scheduler's last turn, let front ends act, and move the clock."""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.invariants.check_state import check_state
from blinkpy.queues.words import CONTROL_COMMAND
from blinkpy.verify.sim.draws import chance, draw, start_draws
from blinkpy.verify.sim.events import EVENT_JUMP, EVENT_POISON, note
from blinkpy.verify.sim.front_ends.front_end_actions import front_turn
from blinkpy.verify.sim.synthetic_model import check_padding
from blinkpy.verify.sim.turn_invariants import check_turn
from blinkpy.verify.sim.world import TICK_NS

LEFT_OVER = fault_code("a step is asked for although the batch is empty, or the other way round")


@device
def check_round(limits, queues, state, sim, turn, bucket):
    """What the scheduler's last turn did, and the step that it asked for. Returns a fault, or 0."""
    fault = 0
    if turn % sim.check_every == 0:
        fault = check_state(limits, state, sim.references, sim.seen)
    if fault == 0:
        fault = check_turn(limits, queues, state, sim, sim.clock[0])
    if fault == 0 and (bucket >= 0) != (state.batch.counts[S.ROWS] > 0):
        fault = LEFT_OVER
    if fault == 0 and bucket >= 0:
        fault = check_padding(state, bucket)
        poison(limits, state, sim, turn)
    return fault


@device
def poison(limits, state, sim, turn):
    """Now and then, the model fails for one row."""
    start_draws(sim.draws, sim.seed, turn, limits.pairs + 1)
    sim.poison[0] = -1
    ends = state.batch.counts[S.GROUP] + 1 >= state.batch.counts[S.GROUPS]
    if ends and turn < sim.turns and sim.muted[turn, limits.pairs] == 0 and chance(sim.draws, sim.odds.poison):
        row = draw(sim.draws, state.batch.counts[S.ROWS])
        slot = state.batch.row_slots[row]
        if state.batch.emits[row] != 0 and sim.fronts.request_id[slot] == state.requests.request_id[slot]:
            note(sim, turn, limits.pairs, EVENT_POISON, row, 0)
            sim.poison[0] = row
            sim.fronts.poisoned[slot] = 1


@device
def play_round(limits, queues, state, sim, turn, bucket, command):
    """Judge the turn before, which returned `bucket`, and prepare the next one.

    turn: from 0; the bucket before the first does not matter. command: COMMAND_*, of the host. Returns the time of the turn, ns,
    or minus a fault.
    """
    if turn > 0:
        fault = check_round(limits, queues, state, sim, turn, bucket)
        if fault != 0:
            return -fault
    queues.control[CONTROL_COMMAND] = command
    start_draws(sim.draws, sim.seed, turn, limits.pairs)
    if turn < sim.turns and sim.muted[turn, limits.pairs] == 0 and chance(sim.draws, sim.odds.jump):
        sim.clock[0] += 2 * limits.lease_ns
        note(sim, turn, limits.pairs, EVENT_JUMP, 2 * limits.lease_ns, 0)
    for pair in range(limits.pairs):
        fault = front_turn(limits, queues, sim, turn, pair, command)
        if fault != 0:
            return -fault
    sim.clock[0] += TICK_NS
    return sim.clock[0]
