"""Bugs planted in the code that uses RDMA: small changes of the source. The named test must find each.

    make test-rdma T=seeded-bugs            or, for some of them, T='seeded-bugs doorbell head'

runs this in the virtual machine and patches a copy of the source. Front ends, engines and listeners of the copy's tests are
separate processes, so all of them have the bug. A patch that no longer fits its module is an error: the list follows the source.
"""

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
TRIES = "3000"  # of the ordering test: its bugs are always present

ORDERING = "test_ordering.py"
POSTING = "../plain/link/test_rdma_posting.py"  # Soft-RoCE reads memory immediately; a simulated card reads it late
CONTENTS = "test_transport.py::test_prompts_hashes_tokens_and_log_probabilities_arrive"
RIGHTS = "test_transport.py::test_a_front_end_reaches_its_own_queues_and_nothing_else"
VERBS = "test_transport.py::test_a_request_costs_four_verbs_and_a_look_one"
FULL_RING = "test_transport.py::test_a_full_completion_ring_loses_nothing"
HEARTBEAT = "test_transport.py::test_each_heartbeat_arrives_with_the_completion_head"
OLD_EPOCH = "test_transport.py::test_what_an_old_epoch_writes_changes_nothing"
OWNERS = "test_transport.py::test_pairs_go_to_their_owners_and_then_to_who_asks"

# fmt: off
PATCHES = {  # (test that must find them, module): (description, before, after)
    (ORDERING, "connect_rdma"): [
        ("the doorbell goes before the entry", "batch.append(self._all_words)", "batch.insert(0, self._all_words)"),
        ("the entry goes before the prompt",
         "self._batch.append(self._piece(start, len(entry)))", "self._batch.insert(0, self._piece(start, len(entry)))"),
    ],
    (ORDERING, "rdma_writes"): [
        ("no write is signalled", "flags = 0 if left else self._signaled", "flags = 0"),
    ],
    (POSTING, "rdma_writes"): [
        ("the doorbell's memory is read by the card later, when it may have changed", "if length <= inline:", "if length < 32:"),
    ],
    (VERBS, "connect_rdma"): [
        ("each completion head costs a write", "if ahead < self._head_step:", "if ahead < 1:"),
    ],
    (FULL_RING, "connect_rdma"): [
        ("the completion head is not written",
         "self._words[index] = value", "self._words[index] = 0 if index == W.FRONT_CQ_HEAD else value"),
        ("the completion head waits for a doorbell, however full the ring is", "if ahead < self._head_step:", "if ahead >= 0:"),
    ],
    (HEARTBEAT, "connect_rdma"): [
        ("the heartbeat is not written",
         "self._words[index] = value", "self._words[index] = 0 if W.FRONT_CQ_HEAD < index < W.FRONT_CLAIM else value"),
    ],
    (CONTENTS, "connect_rdma"): [
        ("the window wraps too early", "index = position & size - 1", "index = position % (size - 1)"),
        ("records are read from the area's start", "self.layout.records + index * RECORD", "self.layout.records + 0 * RECORD"),
        ("words are handed out before their records are there",
         "(look, None) if self._missing else", "(look, look) if self._missing else"),
    ],
    (RIGHTS, "rdma_writes"): [
        ("a failed completion counts as a good one", "if completion.status != self._success:", "if completion.status == 77:"),
    ],
    (RIGHTS, "listen_rdma"): [
        ("the region of a pair is longer than the pair",
         "layout.front_region_bytes, write)", "layout.front_region_bytes + 4096, write)"),
        ("the engine's region may be written",
         "layout.engine_region_bytes, e.IBV_ACCESS_REMOTE_READ", "layout.engine_region_bytes, write | e.IBV_ACCESS_REMOTE_READ"),
    ],
    (RIGHTS, "verbs"): [
        ("all front ends share a protection domain",
         'self.pd = self._made(module("pd").PD(port.context))',
         'self.pd = port.__dict__.setdefault("shared_pd", module("pd").PD(port.context))'),
    ],
    (OLD_EPOCH, "listen_rdma"): [
        ("a pair's old connection lives on",
         "            before.end.close()\n", "            self.__dict__.setdefault('kept', []).append(before)\n"),
    ],
    (OWNERS, "listen_rdma"): [
        ("nobody gets the own pair back", "if grant.owner == owner:", "if grant.owner == -owner:"),
    ],
}
# fmt: on
RDMA_BUGS = tuple((Bug(patch[0], module, *patch[1:]), test) for (test, module), patches in PATCHES.items() for patch in patches)


def run(folder: Path, *tests: str, must_pass: bool = False) -> int:
    """pytest's exit code for the tests of a copy of the source. Shows its output if the exit code is not an expected one."""
    path = os.pathsep.join([str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "timeout",
        "-p",
        "no:cacheprovider",
        *(f"tests/rdma/{test}" for test in tests),
    ]
    environment = os.environ | {"PYTHONPATH": path, "BLINKPY_ORDER_TRIES": TRIES, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    if done.returncode not in (PASSED, FAILED) or (done.returncode == FAILED and must_pass):
        print(done.stdout.decode(errors="replace"))
    return done.returncode


def main(words: list[str]) -> int:
    """Plant each bug whose description has one of the words, or all bugs."""
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
