"""Two front ends at the same time against the real scheduler: 4,000 requests of random lengths, or nightly 10,000, some of them
cancelled."""

import multiprocessing
import time
from typing import Any

import numpy as np
import pytest
from rdma.limits import ATTACH_S, NIGHTLY
from rdma.processes import engine

from blinkpy.config import split_address
from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.dpu.link.queue_pair import InFlightRequest, NoSpaceError, QueuePair
from blinkpy.engine.devices.null_step import synthetic_token
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, FINISH_CANCELLED, FINISH_LENGTH, FINISH_MASK, HAS_TOKEN
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import new_owner

FRONT_ENDS, REQUESTS = 2, 5000 if NIGHTLY else 2000
LIMIT_S = 900.0  # nightly, an idle machine needs a ninth of it
CANCELLED = 0.15  # share of the requests
OPTIONS = (
    *("--device", "null", "--workers", str(FRONT_ENDS), "--slots", "128", "--cq-entries", "512", "--max-model-len", "512"),
    *("--lease-ms", "60000"),  # a busy machine delays a front end's heartbeat by seconds
)


def expected(sampling: RequestParameters, prompt: int, vocab: int) -> list[int]:
    """The null engine's answer: tokens of the vocabulary except its first sixteenth."""
    return [synthetic_token(sampling.seed, prompt + i, vocab // 16, vocab) for i in range(sampling.max_tokens)]


def attached(address: str) -> QueuePair:
    """A queue pair of the engine. Retries a handshake that times out on a busy machine, as a front end does."""
    owner, deadline = new_owner(), time.monotonic() + ATTACH_S
    while True:
        try:
            pair = QueuePair(attach_rdma(*split_address(address, "engine"), owner), 60.0)
            break
        except TransportError:
            if time.monotonic() > deadline:
                raise
    pair.attach(ATTACH_S)
    return pair


def front_end(address: str, seed: int, result: Any) -> None:
    """Submit requests whenever the queue has space, check each answer, and report (problems, cancelled, seconds)."""
    rng = np.random.default_rng(seed)
    pair = attached(address)
    vocab, problems, cancelled, sent = pair.facts.vocab_size, list[str](), 0, 0
    answers: dict[InFlightRequest, list[int]] = {}
    began = beaten = time.monotonic()
    while (sent < REQUESTS or pair.in_flight) and not problems:
        while sent < REQUESTS and pair.free_slots:
            prompt = rng.integers(0, vocab, int(rng.integers(1, 300)), dtype=np.int32)
            sampling = RequestParameters(max_tokens=int(rng.integers(1, 12)), seed=int(rng.integers(0, 2**31)))
            try:
                request = pair.submit(prompt, sampling, (len(prompt), sampling))
            except NoSpaceError:
                break
            answers[request] = []
            sent += 1
            if rng.random() < CANCELLED:  # a fast engine leaves no time for later cancellations
                pair.cancel(request)
        for request, token, flags in pair.poll():
            length, sampling = request.owner
            if request not in answers:
                problems.append(f"a completion after the end of {request.request_id}")
                continue
            if flags & HAS_TOKEN:
                answers[request].append(token)
            finish = flags & FINISH_MASK
            if finish:
                got, wanted = answers.pop(request), expected(sampling, length, vocab)
                if finish == FINISH_CANCELLED:
                    cancelled += 1
                    wanted = wanted[: len(got)] if request.cancelled else []
                elif finish != FINISH_LENGTH:
                    problems.append(f"ended with {finish}")
                if got != wanted:
                    problems.append(f"{got} instead of {wanted}")
        for request in [r for r in answers if not r.cancelled and rng.random() < CANCELLED / 20]:
            pair.cancel(request)
        now = time.monotonic()
        if now - beaten > 0.1:
            beaten = now
            pair.heartbeat()
            pair.check()
        if now - began > LIMIT_S:
            problems.append(f"{len(answers)} requests did not end in {LIMIT_S:g} s; {sent} were sent")
    if pair.stray_completions:
        problems.append(f"{pair.stray_completions} completions for slots without a request")
    time.sleep(0.3)
    words = pair.transport.read_engine()
    result.send((problems[:5], cancelled, time.monotonic() - began, words[COUNTER["integrity_errors"]]))
    pair.close()


@pytest.mark.timeout(LIMIT_S + 400)
def test_nothing_is_lost_repeated_or_reordered(seed) -> None:
    context = multiprocessing.get_context("forkserver")  # its template has imported all modules
    with engine(*OPTIONS) as (command, transport):
        ends = []
        for i in range(FRONT_ENDS):
            here, there = context.Pipe()
            process = context.Process(target=front_end, args=(transport[-1], seed + i, there), daemon=True)
            process.start()
            ends.append((here, process))
        for here, process in ends:
            assert here.poll(LIMIT_S + 60), "a front end is silent"
            problems, cancelled, seconds, integrity = here.recv()
            print(f"{REQUESTS} requests, {cancelled} of them cancelled, in {seconds:.1f} s")
            assert problems == []
            assert integrity == 0
            assert cancelled > 0
            process.join(20)
        assert command.end() == 0, "".join(command.said)  # the engine checks its whole state while idle, and at the end
