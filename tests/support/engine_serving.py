"""An engine in this process with one client, for tests and benchmarks: requests go through the real queues."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from blinkpy.config import Config
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.engine.engine import Engine
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_MASK, HAS_TOKEN, TOP_LOGPROBS
from blinkpy.transport.contract import Transport

ATTACH_S, STOP_S, ANSWERS_S = 20.0, 30.0, 120.0
BUDGET_S = 240.0  # a loop ends by itself if no test stops it
ROUNDING = 1e-3  # of log probabilities, by two float32 forward passes


def config_for(folder: object, **values: Any) -> Config:
    """A CUDA engine of small sizes, changed by `values`."""
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
def running(engine: Engine, budget_s: float = BUDGET_S) -> Iterator[None]:
    """A started engine, in a thread until the end of the block, which stops and closes it. Raises run()'s error, even if the
    block failed: a client sees only that the engine is lost."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.run(budget_s)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        yield
    finally:
        engine.stop()
        thread.join(STOP_S)
        if thread.is_alive():
            raise RuntimeError(f"the engine did not stop within {STOP_S} s")
        engine.close()
        if failures:
            raise failures[0]


@contextlib.contextmanager
def serving(engine: Engine, attach: Callable[[], Transport] | None = None) -> Iterator[QueuePair]:
    """Start and run the engine, with an attached client.

    attach: makes the client's transport, before the loop is launched; default: shared memory.
    """
    engine.start()
    try:
        transport = attach() if attach else attach_segment(engine.config.engine.name, 0, ATTACH_S)
    except BaseException:
        engine.close()
        raise
    with running(engine):
        pair = QueuePair(transport, engine_timeout_s=60)
        try:
            pair.attach(ATTACH_S)
            yield pair
        finally:
            pair.close()


def collect(
    pair: QueuePair, requests: list[InFlightRequest], cancel_after: dict[InFlightRequest, int] | None = None
) -> list[tuple[list[int], int]]:
    """Wait until all requests end: (tokens, FINISH_*) of each. cancel_after: tokens after which to cancel. Raises
    TimeoutError."""
    tokens: dict[InFlightRequest, list[int]] = {request: [] for request in requests}
    finish, open_requests = dict.fromkeys(requests, 0), len(requests)
    deadline, beat = time.monotonic() + ANSWERS_S, 0.0
    while open_requests:
        for request, token, flags in pair.poll():
            assert not finish[request], "a completion after the last one"
            if flags & HAS_TOKEN:
                tokens[request].append(token)
            finish[request] = flags & FINISH_MASK
            open_requests -= finish[request] != 0
            if cancel_after and cancel_after.get(request) == len(tokens[request]):
                pair.cancel(request)
        now = time.monotonic()
        if now > beat:
            pair.heartbeat()
            pair.check()
            beat = now + 0.2
        if now > deadline:
            raise TimeoutError(f"{open_requests} of {len(requests)} requests did not end within {ANSWERS_S:.0f} s")
        time.sleep(0.0002)
    return [(tokens[request], finish[request]) for request in requests]


def generate(pair: QueuePair, prompts: list[list[int]], samplings: list[RequestParameters]) -> tuple[list[list[int]], list[int]]:
    """Submit all requests and wait for all: tokens and FINISH_* of each. Raises TimeoutError."""
    requests = [pair.submit(np.array(prompt, np.int32), sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    results = collect(pair, requests)
    return [tokens for tokens, _ in results], [finish for _, finish in results]


def records_case(rng: np.random.Generator, pair: QueuePair, model: torch.nn.Module, vocabulary: int) -> None:
    """Log probabilities against a transformers model: of greedy and sampled requests, with penalties and without. Every third
    request needs no log probabilities, and prompts share their start."""
    stem = rng.integers(6, vocabulary, 20).tolist()
    prompts = [stem[: int(n) % 24] + rng.integers(6, vocabulary, int(n)).tolist() for n in rng.integers(1, 150, 24)]
    greedy, sampled = RequestParameters(max_tokens=20, temperature=0.0), RequestParameters(max_tokens=20, temperature=1.3, seed=5)
    sampled = sampled.changed(repetition_penalty=1.3, presence_penalty=0.5)
    samplings = [(greedy, sampled)[i % 2].changed(logprobs=(-1, 0, 20)[i % 3]) for i in range(len(prompts))]
    requests = [pair.submit(np.array(prompt, np.int32), samplings[i]) for i, prompt in enumerate(prompts)]
    for prompt, sampling, request, (tokens, _) in zip(prompts, samplings, requests, collect(pair, requests), strict=True):
        assert len(tokens) == 20
        if sampling.logprobs < 0:
            assert not request.records
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = torch.log_softmax(logits.double(), -1)
        ids, values = (np.array(list(request.records))[:, :, part] for part in (0, 1))
        assert ids[:, 0].tolist() == tokens
        np.testing.assert_allclose(values[:, 1:], expected.topk(TOP_LOGPROBS).values, atol=ROUNDING)
        np.testing.assert_allclose(values, np.take_along_axis(expected.numpy(), ids.astype(np.int64), 1), atol=ROUNDING)
