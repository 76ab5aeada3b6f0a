"""A reader that sees a doorbell sees its entry, and a reader that sees an entry sees its prompt: another processor polls both.

BLINKPY_ORDER_TRIES: number of new doorbells to see, 40,000 nightly, otherwise 15,000; docs/rdma.md has the result of a long run.
"""

import mmap
import multiprocessing
import os
import secrets
import time
from typing import Any

import numpy as np
import pytest
from rdma.limits import NIGHTLY

from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.engine.link.listen_rdma import RdmaListener
from blinkpy.queues.layout import EngineFacts, QueueLayout, QueueSizes
from blinkpy.queues.submission import SQ_ENTRY_BYTES
from blinkpy.queues.words import FRONT_DOORBELL
from blinkpy.transport.handshake import new_owner
from blinkpy.transport.segment import create_segment, segment_path

PLACES = 32
LONG, SHORT = 3000, 24  # tokens: three packets of 4,096 bytes, or less than one; the first place has a long prompt
STARTS = [0, *range(LONG, LONG + (PLACES - 1) * SHORT, SHORT)]
LENGTHS = [LONG] + [SHORT] * (PLACES - 1)
SIZES = QueueSizes(1, PLACES, sq_entries=PLACES, cq_entries=16, prompt_tokens=LONG + PLACES * SHORT, hash_entries=16)
FACTS = EngineFacts(1, 65_537, 131_071, 8192, 1 << 20, 16, 64, 16, 600_000)  # the lease outlasts the test, which claims no pair
TRIES = int(os.environ.get("BLINKPY_ORDER_TRIES") or (40_000 if NIGHTLY else 15_000))
EARLY = TRIES // 100  # and number of entries seen before their doorbells
LIMIT_S = 300.0 + TRIES / 40  # a busy machine takes ten times as long as an idle one
LAST = 1 << 30  # numbers have to fit into int32


def watch(name: str, result: Any) -> None:
    """Read the words in the order doorbell, entry, prompt, as an engine does; while the doorbell is unchanged, look for the next
    entry. A place may hold a later submission, but never an earlier one: the front end rewrites places without waiting for the
    reader."""
    layout = QueueLayout(SIZES)
    with open(segment_path(name), "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    front = memory[layout.front_region(0) :][: layout.front_region_bytes]
    doorbell = front.cast("q")[FRONT_DOORBELL:][:1]
    entries = front[layout.sq :][: PLACES * SQ_ENTRY_BYTES].cast("q")
    prompts = front[layout.prompt :].cast("i")
    middles = [start + length // 2 for start, length in zip(STARTS, LENGTHS, strict=True)]
    ends = [start + length - 1 for start, length in zip(STARTS, LENGTHS, strict=True)]
    looks = news = last = early = newest = 0
    wrong: list[tuple[Any, ...]] = []
    deadline = time.monotonic() + LIMIT_S
    while not wrong and (news < TRIES or early < EARLY) and time.monotonic() < deadline:
        for _ in range(1000):
            tail = doorbell[0]
            place = (tail if tail != last else tail + 1) % PLACES
            first = entries[place * 16]
            if tail == last and (first <= tail or first == newest):
                continue
            entry = entries[place * 16 + 15], first
            tokens = prompts[ends[place]], prompts[middles[place]], prompts[STARTS[place]]
            if min(tokens) < first or (tail != last and min(entry) < tail):
                wrong.append((tail, entry, tokens))
            if tail != last:
                news += 1
                last = tail
            else:
                early += 1
                newest = first
        looks += 1000
    result.send((looks, news, early, wrong[:3]))


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_doorbell_never_comes_before_its_entry_nor_an_entry_before_its_prompt() -> None:
    context = multiprocessing.get_context("forkserver")
    name = f"test-{secrets.token_hex(6)}"
    segment = create_segment(name, SIZES, FACTS)
    listener = RdmaListener("127.0.0.1", 0)
    listener.start(segment)
    transport = attach_rdma(*listener.address, new_owner())
    here, there = context.Pipe()
    watcher = context.Process(target=watch, args=(name, there), daemon=True)
    watcher.start()
    queue = transport.queue
    prompts = [np.empty(length, np.int32) for length in LENGTHS]
    entry = np.empty(16, np.int64)
    number = 0
    try:
        while not here.poll():
            for _ in range(100):
                number += 1
                place = number % PLACES
                prompts[place].fill(number)
                entry.fill(number)
                transport.write_prompt(STARTS[place], prompts[place])
                transport.write_entry(place, entry.tobytes())
                transport.ring_doorbell(number)
                deadline = time.monotonic() + 60
                # A place of the copy may be rewritten only after the network card has read it.
                while queue.posted - queue.done > 3 * (PLACES - 2):
                    transport._reap()
                    assert time.monotonic() < deadline
            assert number < LAST, "more submissions than numbers"
            assert watcher.is_alive() or here.poll(), "the watcher ended without a word"
        looks, news, early, wrong = here.recv()
    finally:
        watcher.kill()
        transport.close()
        listener.close()
        segment.close()
    print(f"{number} submissions, {looks} looks, {news} doorbells seen, {early} entries before their doorbells")
    assert not wrong
    assert news >= TRIES
    assert early >= EARLY
