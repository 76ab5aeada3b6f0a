"""The effect of classes under a policy: how much later a request of the other class can arrive and still be
served first, all else equal; and the progress of a best-effort prompt under endless latency-sensitive load.

The first is searched for as in waiting_bounds, and is not a proof either. The second holds for every
policy: it is the rule R16 of docs/verification.md, shown on the scheduler.
"""

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import YIELD_STEPS
from blinkpy.scheduler.policies import Policy, RequestFields
from blinkpy.scheduler.policy_trial import ordinary
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.policy_calls import RankMany
from blinkpy.verify.policy_check.timed_server import NEVER, ServerModel, TimedSimulation
from blinkpy.verify.policy_check.waiting_bounds import BEGINNINGS_S, KINDS, Overtaking, arriving, longest_time

CLASSES = ("latency-sensitive", "best-effort")  # by RequestFields.best_effort
PROMPT, URGENT_PROMPT, OUTPUT = 4096, 768, 4  # tokens
STEP_TOKENS, ROWS, QUEUE = 512, 8, 8
TURNS = 40 * YIELD_STEPS
"""Of a demonstration: with one turn of YIELD_STEPS + 1 the prompt needs PROMPT / STEP_TOKENS of those."""


def class_window(rank_many: RankMany, seed: int, waits: int) -> Overtaking:
    """Search for the overtaking window between requests that differ only in class and time. waits: the class of
    the overtaken request.
    """
    draw = random.Random(seed)
    kinds = [ordinary(draw)._replace(generated=0, preemptions=0) for _ in range(KINDS)]
    own, others = ([kind._replace(best_effort=number) for kind in kinds] for number in (waits, 1 - waits))
    return max((_window(rank_many, own, others, beginning) for beginning in BEGINNINGS_S), key=lambda found: found.window_s)


def _window(rank_many: RankMany, own: list[RequestFields], others: list[RequestFields], beginning: float) -> Overtaking:
    """The widest, where request i of `own`, which waits since `beginning`, is compared with request i of `others`."""
    first = arriving(own, beginning)
    ranks = rank_many(np.array(first, np.int64))

    def overtaken(later: float) -> NDArray[np.bool_]:
        return rank_many(np.array(arriving(others, beginning + later), np.int64)) < ranks

    longest = longest_time(lambda later: bool(overtaken(later).any()))
    place = int(overtaken(longest).argmax())
    return Overtaking(longest, first[place], arriving(others, beginning + longest)[place])


class YieldOutcome(NamedTuple):
    """The outcome of a running best-effort prompt under a stream of latency-sensitive ones."""

    most_turns: int  # consecutive turns in which it yielded
    turns: int  # to its first token, or of the demonstration
    ended: bool


def yield_outcome(policy: Policy) -> YieldOutcome:
    """Start a best-effort prompt, then keep a small server full of latency-sensitive prompts."""
    n = TURNS + QUEUE
    urgent = np.arange(n) > 0
    prompt = np.where(urgent, URGENT_PROMPT, PROMPT)
    zero, output = np.zeros(n, np.int64), np.full(n, OUTPUT)
    requests = Workload(zero, prompt, output, output, zero)
    pages = (PROMPT + ROWS * (URGENT_PROMPT + OUTPUT)) // 16 + 4 * ROWS
    model = ServerModel(ROWS, STEP_TOKENS, page_size=16, num_pages=pages, step_us=4500.0, row_us=22.0, token_us=27.0)
    server = TimedSimulation(policy, model, requests, {"best_effort": np.where(urgent, 0, 1)})
    server.submit(0)
    server.turn()
    submitted = most = turns = 1
    while turns < TURNS and server.outcome.first_token[0] == NEVER:
        while submitted - server.ended < QUEUE + 1:
            server.submit(submitted)
            submitted += 1
        server.turn()
        turns += 1
        most = max(most, server.yielded_turns)
    return YieldOutcome(most, turns, bool(server.outcome.first_token[0] != NEVER))
