"""Bugs on purpose in what goes over RDMA: small changes of the source, each of which the named test must find.

    make test-rdma T=seeded-bugs            or, for some of them, T='seeded-bugs doorbell head'

runs this in the virtual machine, where a copy of the source is patched: front ends, engines and listeners of the copy's tests are
processes of their own, so they all have the bug. A patch that no longer fits its module is an error: the list follows the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.seeded_bugs import Bug, module_of, patched_source

ROOT = Path(__file__).parents[2]
COPIED = ("blinkpy", "benchmarks", "tests", "pyproject.toml")
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT_S = 600
TRIES = "3000"  # of the ordering test, for which a bug is there all the time

ORDERING = "test_ordering.py"
POSTING = "../plain/link/test_rdma_posting.py"  # Soft-RoCE reads memory at once, and a stand-in for a card late
CONTENTS = "test_transport.py::test_prompts_hashes_tokens_and_log_probabilities_arrive"
RIGHTS = "test_transport.py::test_a_front_end_reaches_its_own_queues_and_nothing_else"
VERBS = "test_transport.py::test_a_request_costs_four_verbs_and_a_look_one"
FULL_RING = "test_transport.py::test_a_full_completion_ring_loses_nothing"
HEARTBEAT = "test_transport.py::test_each_heartbeat_arrives_with_the_completion_head"
OLD_EPOCH = "test_transport.py::test_what_an_old_epoch_writes_changes_nothing"
OWNERS = "test_transport.py::test_pairs_go_to_their_owners_and_then_to_who_asks"

# Each with the test that must find it.
RDMA_BUGS = (
    # order and completion of writes
    (
        Bug(
            "the doorbell goes before the entry",
            "connect_rdma",
            "batch.append(self._all_words)",
            "batch.insert(0, self._all_words)",
        ),
        ORDERING,
    ),
    (
        Bug(
            "the entry goes before the prompt",
            "connect_rdma",
            "self._batch.append(self._piece(start, len(entry)))",
            "self._batch.insert(0, self._piece(start, len(entry)))",
        ),
        ORDERING,
    ),
    (
        Bug(
            "the doorbell's memory is read by the card later, when it may have changed",
            "rdma_writes",
            "if length <= inline:",
            "if length < 32:",
        ),
        POSTING,
    ),
    (Bug("no write is signalled", "rdma_writes", "flags = 0 if left else self._signaled", "flags = 0"), ORDERING),
    (
        Bug(
            "a failed completion counts as a good one",
            "rdma_writes",
            "if completion.status != self._success:",
            "if completion.status == 77:",
        ),
        RIGHTS,
    ),
    (Bug("each completion head costs a write", "connect_rdma", "if ahead < self._head_step:", "if ahead < 1:"), VERBS),
    # words
    (
        Bug(
            "the completion head is not written",
            "connect_rdma",
            "self._words[index] = value",
            "self._words[index] = 0 if index == W.FRONT_CQ_HEAD else value",
        ),
        FULL_RING,
    ),
    (
        Bug(
            "the completion head waits for a doorbell, however full the ring is",
            "connect_rdma",
            "if ahead < self._head_step:",
            "if ahead >= 0:",
        ),
        FULL_RING,
    ),
    (
        Bug(
            "the heartbeat is not written",
            "connect_rdma",
            "self._words[index] = value",
            "self._words[index] = 0 if W.FRONT_CQ_HEAD < index < W.FRONT_CLAIM else value",
        ),
        HEARTBEAT,
    ),
    # windows of the completion ring
    (Bug("the window wraps too early", "connect_rdma", "index = position & size - 1", "index = position % (size - 1)"), CONTENTS),
    (
        Bug(
            "records are read from the area's start",
            "connect_rdma",
            "self._read(RECORDS, self.layout.records + index * RECORD_BYTES,",
            "self._read(RECORDS, self.layout.records + 0 * RECORD_BYTES,",
        ),
        CONTENTS,
    ),
    (
        Bug(
            "words are handed out before their records are there",
            "connect_rdma",
            "            self._pending = look\n",
            "            self._pending = self._look = look\n",
        ),
        CONTENTS,
    ),
    # rights and pairs
    (
        Bug(
            "the region of a pair is longer than the pair",
            "listen_rdma",
            "layout.first_pair, layout.front_region_bytes, write)",
            "layout.first_pair, layout.front_region_bytes + 4096, write)",
        ),
        RIGHTS,
    ),
    (
        Bug(
            "the engine's region may be written",
            "listen_rdma",
            "layout.first_pair, layout.engine_region_bytes, e.IBV_ACCESS_REMOTE_READ",
            "layout.first_pair, layout.engine_region_bytes, write | e.IBV_ACCESS_REMOTE_READ",
        ),
        RIGHTS,
    ),
    (
        Bug(
            "all front ends share a protection domain",
            "verbs",
            'self.pd = self._made(module("pd").PD(port.context))',
            'self.pd = port.__dict__.setdefault("shared_pd", module("pd").PD(port.context))',
        ),
        RIGHTS,
    ),
    (
        Bug(
            "a pair's old connection lives on",
            "listen_rdma",
            "            before.end.close()\n",
            "            self.__dict__.setdefault('kept', []).append(before)\n",
        ),
        OLD_EPOCH,
    ),
    (
        Bug("nobody gets the own pair back", "listen_rdma", "if grant.owner == owner:", "if grant.owner == -owner:"),
        OWNERS,
    ),
)


def run(folder: Path, *tests: str, must_pass: bool = False) -> int:
    """pytest's exit code for the tests of a copy of the source. What it says is shown when it should have ended otherwise."""
    path = os.pathsep.join([str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/rdma/{test}" for test in tests)]
    environment = os.environ | {"PYTHONPATH": path, "BLINKPY_ORDER_TRIES": TRIES, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    if done.returncode not in (PASSED, FAILED) or (done.returncode == FAILED and must_pass):
        print(done.stdout.decode(errors="replace"))
    return done.returncode


def main(words: list[str]) -> int:
    """Look for those bugs whose description has one of the words, or for all."""
    bugs = [(bug, test) for bug, test in RDMA_BUGS if not words or any(word in bug.what for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in COPIED:
            whole = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            whole(ROOT / name, folder / name)
        if run(folder, *sorted({test for _, test in bugs}), must_pass=True) != PASSED:
            print("these tests should pass without any bug")
            return 2
        print("no bug: passed", flush=True)
        for bug, test in bugs:
            target = folder / module_of(bug)[1].relative_to(ROOT)
            target.write_text(patched_source(bug))
            began = time.monotonic()
            code = run(folder, test)
            missed += code != FAILED
            found = "found" if code == FAILED else f"MISSED (exit code {code})"
            print(f"{found} in {time.monotonic() - began:.0f} s: {bug.what} [{test}]", flush=True)
            shutil.copy(ROOT / target.relative_to(folder), target)
    print(f"{len(bugs) - missed} of {len(bugs)} bugs were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
