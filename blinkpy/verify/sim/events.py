"""What happens in a simulation, as numbers in Sim.log: the last events are told when something is wrong."""

from blinkpy.device.portable import device

LOG = 64  # events that are remembered
LOG_WORDS = 5  # turn, actor, event (EVENT_*), two values

# What happens, in Sim.log.
(
    EVENT_CRASH,
    EVENT_RETURN,
    EVENT_SUBMIT,
    EVENT_SUBMIT_BAD,
    EVENT_CANCEL,
    EVENT_SILENT,
    EVENT_LATE,
    EVENT_BREAK,
    EVENT_PACE,
    EVENT_JUMP,
    EVENT_POISON,
    EVENT_CLAIM,
) = range(12)
EVENT_NAMES = (
    "crashes",
    "comes back",
    "submits (slot, tokens)",
    "submits a bad entry (slot, kind)",
    "cancels (slot)",
    "stops for a while (turns)",
    "a write of an earlier epoch lands (word, value)",
    "breaks the protocol (word)",
    "reads at another pace (0 fast, 1 slow, 2 not at all)",
    "time jumps (ns)",
    "the model gives an invalid token (row)",
    "claims the pair (epoch)",
)


@device
def note(sim, turn, actor, event, first, second):
    """Remember an event."""
    i = sim.logged[0] % LOG
    sim.log[i, 0], sim.log[i, 1], sim.log[i, 2] = turn, actor, event
    sim.log[i, 3], sim.log[i, 4] = first, second
    sim.logged[0] += 1
