"""Who sees a doorbell sees its entry, and who sees an entry sees its prompt: looked at from another processor, without pause."""

from __future__ import annotations

import mmap
import multiprocessing
import secrets
import time
from typing import Any

import numpy as np

from blinkpy import queues
from blinkpy.dpu.handshake import new_owner
from blinkpy.dpu.rdma import attach_rdma
from blinkpy.dpu.shm import create_segment, segment_path
from blinkpy.rdma_listener import RdmaListener

PLACES, TOKENS = 16, 3000  # a prompt takes three packets of 4,096 bytes
SIZES = queues.QueueSizes(pairs=1, slots=16, sq_entries=PLACES, cq_entries=16, prompt_tokens=PLACES * TOKENS, hash_entries=16)
FACTS = queues.EngineFacts(1, 65_537, 131_071, 8192, 1 << 20, 16, 64, 16, 60_000)
LOOKS, NEWS = 1_000_000, 1000  # least numbers: of looks, and of those that find a new doorbell
LIMIT_S = 120.0


def watch(name: str, result: Any) -> None:
    """Look at the words in the order doorbell, entry, prompt, as an engine does. Later submissions may already be there,
    earlier ones never: places are written again and again without waiting for anybody."""
    layout = queues.QueueLayout(SIZES)
    with open(segment_path(name), "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    longs, ints = memory.cast("q"), memory.cast("i")
    doorbell = layout.front(0) // 8 + queues.FRONT_DOORBELL
    entries = (layout.front(0) + layout.sq) // 8
    prompts = (layout.front(0) + layout.prompt) // 4
    looks, news, last = 0, 0, 0
    wrong: list[tuple[Any, ...]] = []
    deadline = time.monotonic() + LIMIT_S
    while not wrong and (looks < LOOKS or news < NEWS) and time.monotonic() < deadline:
        for _ in range(1000):
            tail = longs[doorbell]
            if tail != last:
                news += 1
                last = tail
            place = (tail - 1) % PLACES
            entry = longs[entries + place * 16]
            first = prompts + place * TOKENS
            tokens = ints[first], ints[first + TOKENS // 2], ints[first + TOKENS - 1]
            if tail and (entry < tail or min(tokens) < entry):
                wrong.append((tail, entry, tokens))
        looks += 1000
    result.send((looks, news, wrong[:3]))


def test_a_doorbell_never_comes_before_its_entry_nor_an_entry_before_its_prompt() -> None:
    context = multiprocessing.get_context("spawn")
    name = f"test-{secrets.token_hex(6)}"
    segment = create_segment(name, SIZES, FACTS)
    listener = RdmaListener("127.0.0.1", 0)
    listener.start(segment)
    transport = attach_rdma(*listener.address, new_owner())
    here, there = context.Pipe()
    watcher = context.Process(target=watch, args=(name, there), daemon=True)
    watcher.start()
    number = 0
    try:
        while not here.poll():
            number += 1
            place = (number - 1) % PLACES
            transport.write_prompt(place * TOKENS, np.full(TOKENS, number, np.int32))
            transport.write_entry(place, np.full(16, number, np.int64).tobytes())
            transport.ring(number)
            deadline = time.monotonic() + 10
            # A place of the copy may be written again only when the network card has read it.
            while transport.queue.posted - transport.queue.done > 3 * (PLACES - 2):
                transport._reap()
                assert time.monotonic() < deadline
            assert watcher.is_alive() or here.poll(), "the watcher ended without a word"
        looks, news, wrong = here.recv()
    finally:
        watcher.kill()
        transport.close()
        listener.close()
        segment.close()
    print(f"{number} submissions, {looks} looks, {news} of them at something new")
    assert not wrong
    assert looks >= LOOKS
    assert news >= NEWS
