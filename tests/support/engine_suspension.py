"""Requests of both classes on an engine with cut steps, until many steps were suspended: tokens equal those of transformers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_CANCELLED, FINISH_LENGTH, FINISH_MASK, HAS_TOKEN

LONGEST, OUTPUT = 120, 6
CLEAR = 1e-3  # between two logits: many times the difference of sums in another order
CUT: dict[str, Any] = {"step_groups": 5, "cut_step_tokens": 16, "suspend_steps": 2, "enable_prefix_caching": False}


class Prompts:
    """Prompts of both classes whose answers no rounding decides, with the answers of transformers' model."""

    def __init__(self, rng: np.random.Generator, model: Any, vocabulary: int):
        lengths = {1: rng.integers(LONGEST // 2, LONGEST, 8), 0: rng.integers(1, 12, 8)}  # by class; 1: best effort
        self.of: dict[int, list[np.ndarray]] = {tier: [] for tier in lengths}
        self.wanted: dict[int, list[list[int]]] = {tier: [] for tier in lengths}
        for tier, own in lengths.items():
            for length in own:
                answer = None
                while answer is None:
                    prompt = rng.integers(6, vocabulary, int(length)).astype(np.int32)
                    answer = clear_answer(model, prompt)
                self.of[tier].append(prompt)
                self.wanted[tier].append(answer)


def clear_answer(model: Any, prompt: np.ndarray) -> list[int] | None:
    """The most probable tokens after a prompt; None if another token is nearly as probable, so that rounding decides."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        both = model.generate(ids, max_new_tokens=OUTPUT, do_sample=False)
        best = model(both[:, :-1]).logits[0, len(prompt) - 1 :].float().topk(2).values
    return both[0, len(prompt) :].tolist() if (best[:, 0] - best[:, 1]).min() > CLEAR else None


def suspension_case(
    rng: np.random.Generator, client: QueuePair, prompts: Prompts, suspensions: Callable[[], int], wanted: int, seconds: float
) -> int:
    """Keep best-effort prompts in steps, submit latency-sensitive prompts at any time, and cancel some of both. Ends once
    suspensions(), the engine's counter, is `wanted`. Returns the number of ended requests. Raises TimeoutError after
    `seconds`."""
    open_requests = dict[InFlightRequest, tuple[int, int, list[int]]]()
    ended, deadline = 0, time.monotonic() + seconds
    while open_requests or suspensions() < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{suspensions()} suspensions and {len(open_requests)} open requests after {seconds:g} s")
        for tier, most in ((1, 6), (0, 3)):
            held = sum(other == tier for other, _, _ in open_requests.values())
            if suspensions() < wanted and held < most and (tier or rng.random() < 0.02):
                which = int(rng.integers(len(prompts.of[tier])))
                parameters = RequestParameters(max_tokens=OUTPUT, temperature=0.0, best_effort=tier)
                open_requests[client.submit(prompts.of[tier][which], parameters)] = tier, which, []
        for request, token, flags in client.poll():
            tier, which, tokens = open_requests[request]
            if flags & HAS_TOKEN:
                tokens.append(token)
            if finish := flags & FINISH_MASK:
                answer = prompts.wanted[tier][which]
                assert finish in (FINISH_LENGTH, FINISH_CANCELLED)
                assert tokens == (answer if finish == FINISH_LENGTH else answer[: len(tokens)]), (tier, which)
                del open_requests[request]
                ended += 1
        if open_requests and rng.random() < 0.002:
            client.cancel(list(open_requests)[int(rng.integers(len(open_requests)))])
        client.heartbeat()
        time.sleep(float(rng.random()) * 2e-4)
    return ended
