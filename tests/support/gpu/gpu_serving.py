"""A CUDA engine in this process with one client, for tests and benchmarks: requests go through the real queues."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blinkpy.config import Config
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.engine.engine import Engine
from blinkpy.queues.completion import FINISH_MASK, HAS_TOKEN
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.transport.contract import Transport

ATTACH_S, STOP_S = 20.0, 30.0
BUDGET_S = 240.0  # a loop that nobody stops ends by itself


def config_for(folder: object, **values: Any) -> Config:
    """Small sizes, unless `values` says otherwise."""
    small = {
        "model": str(folder),
        "device": "cuda",
        "name": f"test-{secrets.token_hex(6)}",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "slots": 64,
        "num_pages": 512,
        "max_model_len": 256,
        "lease_ms": 60_000,
    }
    return Config().with_options({**small, **values})


@contextlib.contextmanager
def serving(engine: Engine, budget_s: float = BUDGET_S, attach: Callable[[], Transport] | None = None) -> Iterator[QueuePair]:
    """Start the engine, run it in a thread, attach to it; stop and close it at the end. Raises what run() raised.

    attach: makes the client's transport, before the loop is launched; default: shared memory.
    """
    engine.start()
    try:
        transport = attach() if attach else attach_segment(engine.config.engine.name, 0, ATTACH_S)
    except BaseException:
        engine.close()
        raise
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.run(budget_s)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        pair = QueuePair(transport)
        pair.attach(ATTACH_S)
        yield pair
        pair.close()
    finally:
        engine.stop()
        thread.join(STOP_S)
        stuck = thread.is_alive()
        if not stuck:
            engine.close()
    if stuck:
        raise RuntimeError(f"the engine did not stop within {STOP_S} s")
    if failures:
        raise failures[0]


def generate(
    pair: QueuePair, prompts: list[list[int]], samplings: list[RequestParameters], timeout_s: float = 60.0
) -> tuple[list[list[int]], list[int]]:
    """Submit all, wait for all: tokens and final flags of each request. Raises TimeoutError."""
    tokens: list[list[int]] = [[] for _ in prompts]
    flags = [0] * len(prompts)
    requests: list[InFlightRequest] = [
        pair.submit(np.array(prompt, np.int32), sampling, index)
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    open_requests, deadline = len(requests), time.monotonic() + timeout_s
    beat = 0.0
    while open_requests:
        for request, token, flag in pair.poll():
            index = request.owner
            if flag & HAS_TOKEN:
                tokens[index].append(token)
            if flag & FINISH_MASK:
                flags[index] = flag & FINISH_MASK
                open_requests -= 1
        now = time.monotonic()
        if now > beat:
            pair.heartbeat()
            pair.check()
            beat = now + 0.2
        if now > deadline:
            raise TimeoutError(f"{open_requests} of {len(requests)} requests did not end within {timeout_s:.0f} s")
        time.sleep(0.0002)
    return tokens, flags
