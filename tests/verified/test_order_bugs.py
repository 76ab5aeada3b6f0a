"""Bugs in the order of accesses: for each of O1 to O8 of docs/verification.md, an access of the code is moved or weakened.

Most do no harm on machines that always keep the order; storms on weak machines must find them. Bugs that need no special machine
are among the seeded bugs (support/seeded_bugs.py).

Supports claim memory/orders.
"""

import pytest
from support.front_end.weak_link import weak_storms
from support.part_of_cases import part_of
from support.seeded_bugs import Bug, patched_source, planted
from verified.memory_model.machines import WEAK

SEEDS = 40  # seeds of the links on which a test looks for a bug; the first finds most

FENCED = "        self._fence()  # "
DOORBELL_FENCED = FENCED + "store the doorbell after the entry: O1 of docs/verification.md\n"
DOORBELL = "        self._words[self._front + W.FRONT_DOORBELL] = doorbell\n"
HEAD = "store_release(queues.pair, (taken, PAIR_SQ_HEAD), pairs.sq_head[taken])"
CONSUME = "        tokens += consume_entry("
READ = "            words = self.transport.read_completions(position, min(window, end - position))\n"
POSITIONS = "            store_release(queues.pair, (pair, PAIR_SQ_HEAD), pairs.sq_head[pair])\n"
EPOCH = "            store_release(queues.pair, (pair, PAIR_EPOCH), pairs.epoch[pair])\n"
GRANT = """        epoch = words[base + W.PAIR_EPOCH]
        self._fence()  # load the other words after the epoch: O5 of docs/verification.md
        return EngineWords(words[base + W.PAIR_SQ_HEAD], words[base + W.PAIR_CQ_TAIL], epoch, words[base + W.PAIR_ATTACHED])
"""
WORD = "        store_release(queues.cq, (pair, entry), word)\n"
RECORD = "        for k in range(LOGPROB_ENTRIES):\n"
CANCEL = "cancel[slot] == requests.request_id[slot] and"

# fmt: off
ORDER_BUGS = {
    "O1": (
        Bug("the doorbell is not acquired", "ownership", "load_acquire(queues", "load_relaxed(queues"),
        Bug("no fence before the doorbell", "connect_shm", DOORBELL_FENCED, ""),
        Bug("the fence is behind the doorbell", "connect_shm", DOORBELL_FENCED + DOORBELL, DOORBELL + DOORBELL_FENCED),
        Bug("the system call is no barrier", "store_fence",
            "    _membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)", "    _membarrier(MEMBARRIER_CMD_QUERY)"),
        Bug("Arm is taken for an ordered machine", "store_fence", "    return membarrier", "    return no_fence"),
    ),
    "O2": (
        Bug("the submission head is no release", "intake", HEAD, HEAD.replace("release", "relaxed")),
        Bug("the submission head is stored before the entry is read", "intake", CONSUME,
            "        store_release(queues.pair, (pair, PAIR_SQ_HEAD), pairs.sq_head[pair] + 1)\n" + CONSUME),
    ),
    "O3": (
        Bug("a word is stored before its lap", "completions", "        store_relaxed(queues.cq, (pair, entry), word)\n",
            "        store_relaxed(queues.cq, (pair, entry), word ^ 1)\n        store_relaxed(queues.cq, (pair, entry), word)\n"),
    ),
    "O4": (
        Bug("the completion head is stored before the words are read", "queue_pair",
            READ,
            "            self.transport.write_word(W.FRONT_CQ_HEAD, self._stamp(self._cq_position + 1))\n" + READ),
        Bug("the engine does not wait for the head", "ownership",
            "inbox.cq_head[pair] = head", "inbox.cq_head[pair] = head + (head & 3 == 1)"),
    ),
    "O5": (
        Bug("the grant is no release", "ownership", EPOCH, EPOCH.replace("release", "relaxed")),
        Bug("the grant comes before the positions", "ownership", POSITIONS,
            EPOCH.replace("pairs.epoch[pair])", "pairs.epoch[pair] + (1 if verdict & S.GRANT else 0))") + POSITIONS),
        Bug("attached is read before the grant", "connect_shm",
            GRANT,
            "        attached = words[base + W.PAIR_ATTACHED]\n" + GRANT.replace("words[base + W.PAIR_ATTACHED]", "attached")),
        Bug("no fence between grant and positions", "connect_shm", FENCED + "load the other words", "        # "),
    ),
    "O6": (
        Bug("a head of an earlier epoch is accepted", "ownership",
            "if head >> EPOCH_SHIFT == epoch:", "if head >> EPOCH_SHIFT <= epoch:"),
    ),
    "O7": (
        Bug("a cancel names no request", "commit", CANCEL, "cancel[slot] != 0 and"),
    ),
    "O8": (
        Bug("a word with a record is no release", "completions", WORD, WORD.replace("release", "relaxed")),
        Bug("a word comes before its record", "completions", RECORD, WORD + RECORD),
        Bug("no fence before the record is read", "connect_shm", FENCED + "after the loads", "        # "),
        Bug("no fence behind the record", "connect_shm", FENCED + "and before", "        # "),
    ),
}
# fmt: on


EVERY = [(name, bug) for name, bugs in ORDER_BUGS.items() for bug in bugs]


def test_every_patch_fits() -> None:
    assert all(patched_source(bug) for _, bug in EVERY)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=f"{name}-{bug.what}") for name, bug in part_of(EVERY, 2)])
def test_an_access_that_is_moved_or_weakened_is_found(bug: Bug) -> None:
    with planted(bug):
        for seed in range(SEEDS):
            try:
                weak_storms(seed, WEAK, WEAK)
            except Exception:  # any exception means that the bug was noticed
                return
    raise AssertionError("not found")
