"""What classes will be worth: the load of benchmarks.serving.classes on the scheduler itself, with a model of the steps' times.

    python -m benchmarks.tuning.class_capacity --inside "step_groups=63"

The times are those of benchmarks.tuning.capacity.
"""

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np

from benchmarks.common.harness import ROOT
from benchmarks.serving.workload import SENSITIVE, Bursts, read_dataset, two_classes
from benchmarks.tuning.capacity import StepTimes, TimedMachine, read_decode, requests_of
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.policy_check.timed_server import NEVER, TimedSimulation, serve
from blinkpy.kv import state as S


def run(machine, requests, urgent, tiers: bool, words=None, seconds=30.0, verbose=False, horizon=None):
    words = {"best_effort": np.where(urgent, 0, 1)} if tiers else {}
    server = TimedSimulation(SHIPPED["short-prompts"], machine, requests, words, most_slots=512)
    tokens_in = 0
    # tokens of best effort within the window
    stamps = []
    original = server._read
    before = np.zeros(len(requests), np.int64)

    def read():
        original()

    server._read = read
    trace = []
    turn = server.turn
    def traced():
        start = server.now
        ok = turn()
        b = server._state.batch
        if ok:
            n = int(b.counts[S.ROWS])
            nums = server._number[b.row_slots[:n]].copy()
            trace.append((start, server.now, int(b.counts[S.GROUP]), int(b.counts[S.GROUPS]), int(b.counts[S.TOKENS]), int(b.counts[S.DECODE_ROWS]), nums, b.emits[:n].copy(), np.diff(b.query_starts[: n + 1])))
        return ok
    server.turn = traced
    out = serve_classes(server, urgent if tiers else np.zeros(len(urgent), bool), 384 if tiers else 512)
    got = np.zeros(len(requests), np.int64)
    for start, end, g, gs, t, d, nums, emits, q in trace:
        if g + 1 == gs and end <= seconds * 1e9:
            got[nums] += emits
    short = urgent & (requests.prompt <= 512)
    ttft = 1000 * out.ttft_s[short] + machine.times.outside_ms
    many = urgent & (requests.output > 1)
    tpot = ((out.ended - out.first_token)[many] / (requests.output[many] - 1)) / 1e6
    turn_ = 1000 * out.end_to_end_s[~urgent]
    busy = sum(server.durations) / 1e9
    return dict(p50=np.median(ttft), p90=np.percentile(ttft, 90), p99=np.percentile(ttft, 99), max=ttft.max(), tpot50=np.median(tpot), tpot99=np.percentile(tpot, 99),
        be=got[~urgent].sum() / seconds, ls=got[urgent].sum() / seconds, turn=turn_.mean(), n=short.sum(), susp=server.counter("suspensions"), steps=server.counter("steps") if 0 else out.steps, end=server.now / 1e9), trace, out, ttft


def serve_classes(server, urgent, most):
    from collections import deque
    doors = [deque(), deque()]
    n = len(server.requests); due = server.due; nxt = 0; flex = 0; idle = 0
    while server.ended < n:
        while nxt < n and due[nxt] <= server.now:
            doors[0 if urgent[nxt] else 1].append(nxt); nxt += 1
        while server.free and (doors[0] or (doors[1] and flex < most)):
            if doors[0]: server.submit(doors[0].popleft())
            else: server.submit(doors[1].popleft()); flex += 1
        if server.turn(): idle = 0
        elif nxt < n: server.now = max(server.now, int(due[nxt]))
        elif not server.over:
            server.now += 1_000_000; idle += 1
            assert idle < 1000
        for i in server.over: flex -= 0 if urgent[i] else 1
    return server.outcome


def load(seconds, seed, rate=16.0, sensitive=0.2, every=15.0, burst=64):
    data = read_dataset("azure", 8192)
    reqs = two_classes(data, rate, seconds, sensitive, Bursts(burst, 4000, 64, every), seed, 1000)
    due = np.array([r.due for r in reqs])
    return requests_of(due, np.array([len(r.prompt) for r in reqs]), np.array([r.max_tokens if hasattr(r, "max_tokens") else r.answer for r in reqs])), np.array([r.tier == SENSITIVE for r in reqs])


def machine(**more):
    times = StepTimes(read_decode(ROOT / "benchmarks/results/decode-llama-3-8b.json", 42.0))
    base = dict(max_num_seqs=256, max_num_batched_tokens=8192, page_size=16, num_pages=45_000, mixed_step_tokens=512, burst_step_tokens=2048)
    return TimedMachine(**(base | more), times=times)
