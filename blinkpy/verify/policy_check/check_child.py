"""The child process of `blinkpy check`, which runs the user's code with time limits: the trial, then the other checks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blinkpy.config import YIELD_STEPS
from blinkpy.scheduler.policies import SHIPPED, Policy, RequestFields, load_policy
from blinkpy.scheduler.policy_trial import CALLS_S, Trial, call_again, run_trial, show, within
from blinkpy.scheduler.policy_vetting import Finding, Level
from blinkpy.tool_options import CheckOptions
from blinkpy.verify.policy_check import waiting_bounds as policy_calls
from blinkpy.verify.policy_check.check_workload import load_workload
from blinkpy.verify.policy_check.timed_server import ServerModel, ServerOutcome, StuckError, simulate
from blinkpy.verify.policy_check.waiting_bounds import (
    CLASSES,
    RankMany,
    class_window,
    flood,
    overtaking,
    tenant_shares,
    yield_outcome,
)
from blinkpy.verify.sim.runs import run

COMPILE_S = 300  # CPU time of a stage that compiles
MUCH_SERVICE = 1 << 40  # thousandths of a token
PERCENTILES = (50, 90, 99, 100)


class Check(Trial):
    """A trial, and the further checks of `blinkpy check`."""

    def __init__(self, options: CheckOptions, send: Callable[[dict[str, Any]], None]):
        super().__init__(options.policy, send, options.seed)
        self.options = options

    def thorough(self) -> None:
        """Compile, search for requests that starve, and compare with the shipped policies."""
        function, sampled, ranks = self.quick()
        options, name = self.options, self.options.policy
        if name not in SHIPPED:
            path, loaded = Path(function.__code__.co_filename), self.load()
            self.require(*within(path, lambda: call_again(loaded, sampled, ranks, "when the file is loaded again")))
        self.stage("compile", COMPILE_S)
        policy = load_policy(name, self.source)
        self.require(policy_calls.compile_for_gpu(policy))
        rank_many = policy_calls.compile_ranks(policy)
        self.stage("compiled calls", CALLS_S)
        self.require(*policy_calls.compare_compiled(policy, rank_many, sampled, ranks))
        self.report(Finding("fine", "determinism", "compiled code gives the same ranks as Python"))
        if options.storm:
            self.stage("storm", COMPILE_S + options.timeout_s)
            self.report(storm_finding(policy, options))
        self.stage("waiting", COMPILE_S + options.timeout_s)
        self.report(*waiting_findings(policy, rank_many, options))
        self.stage("classes", COMPILE_S + options.timeout_s)
        self.report(*class_findings(policy, rank_many, options), tenant_finding(policy, rank_many, sampled))
        model = ServerModel.of(options)
        requests = load_workload(options.workload).first(options.requests).at_rate(options.rate)
        others = [shipped for shipped in SHIPPED if shipped not in (name, "fair")]  # with one tenant, fair equals fcfs
        if len(set(requests.priority.tolist())) == 1 and "priority" in others:
            others.remove("priority")  # without priorities it equals fcfs
        for other in [name, *others]:
            self.stage(f"simulation of {other}", COMPILE_S + options.timeout_s)
            try:
                outcome = simulate(policy if other == name else SHIPPED[other], model, requests)
            except StuckError as error:
                self.report(Finding("error", "liveness", f"{other}: {error}"))
                continue
            self._send({"outcome": summary(other, outcome)})
            if other == name:
                self.report(Finding("fine", "liveness", f"all {len(requests):,} requests of the workload finish"))


def storm_finding(policy: Policy, options: CheckOptions) -> Finding:
    """Run the simulator of docs/verification.md, with crashes, cancels, slow readers, late writes, and page shortage."""
    report = run(policy, options.seed + 1, options.storm, seconds=options.timeout_s)
    if report.failures:
        return Finding("error", "storm", str(report.failures[0][1]))
    text = f"{report.calls:,} turns in {report.worlds:,} simulated worlds with injected faults: all invariants hold"
    return Finding("fine", "storm", text)


def waiting_findings(policy: Policy, rank_many: Any, options: CheckOptions) -> list[Finding]:
    """The results of the search for starvation."""
    findings: list[Finding] = []
    level: Level = "warning" if options.allow_starvation else "error"
    for preempted in (False, True):
        worst = overtaking(rank_many, options.seed, preempted)
        request = "a request that was preempted" if preempted else "a request"
        if worst.window_s == 0:
            text = f"{request} is never overtaken by later requests"
        elif worst.bounded:
            text = f"{request} is overtaken only by requests that arrive within {_duration(worst.window_s)} of it"
        else:
            text = (
                f"{request} may starve: {show(worst.waits)} is overtaken even by {show(worst.overtakes)} that arrives a day later"
            )
        if not worst.bounded and not preempted:
            shown = flood(policy, worst)
            fate = "it waits" if shown.started else "still waiting after"
            text += f"; simulated at full load: {fate} {shown.waited_s:.1f} s, overtaken by {shown.overtaken_by:,} later requests"
            text += f", the last of which arrived {shown.last_arrived_s:.1f} s after it"
        findings.append(Finding("fine" if worst.bounded else level, "waiting", text))
    return findings


def class_findings(policy: Policy, rank_many: Any, options: CheckOptions) -> list[Finding]:
    """The effect of classes under a policy: bounded precedence, and how long best-effort prompts yield."""
    findings: list[Finding] = []
    level: Level = "warning" if options.allow_starvation else "error"
    for waits in (1, 0):
        worst = class_window(rank_many, options.seed, waits)
        request, other = f"a {CLASSES[waits]} request", CLASSES[1 - waits]
        if worst.window_s == 0:
            text = f"{request} is never overtaken by later {other} requests, all else equal"
        elif worst.bounded:
            bound = _duration(worst.window_s)
            text = f"{request} is overtaken only by {other} requests that arrive within {bound} of it, all else equal"
        else:
            shown = flood(policy, worst)
            fate = "it waits" if shown.started else "still waiting after"
            text = (
                f"{request} may starve: {show(worst.waits)} is overtaken even by {show(worst.overtakes)} that arrives a day later"
            )
            text += f"; simulated at full load: {fate} {shown.waited_s:.1f} s, overtaken by {shown.overtaken_by:,} later requests"
        if waits and worst.bounded:
            text += f"; {YIELD_STEPS} of them may pass it, whatever their rank, before a request of its class is admitted"
        findings.append(Finding("fine" if worst.bounded else level, "classes", text))
    yields = yield_outcome(policy)
    text = f"under endless latency-sensitive load, a best-effort prompt yields in at most {yields.most_turns} consecutive turns"
    if yields.ended and yields.most_turns <= YIELD_STEPS:
        return [*findings, Finding("fine", "classes", f"{text}, and gets its first token after {yields.turns} turns")]
    return [*findings, Finding("error", "classes", f"{text}, and has no first token after {yields.turns} turns")]


def tenant_finding(policy: Policy, rank_many: RankMany, requests: list[RequestFields]) -> Finding:
    """Whether tenants are served by weight. If not, the finding is an error for a policy that reads tenants' service, and a note
    for other policies.
    """
    more = [request._replace(tenant_service=request.tenant_service + MUCH_SERVICE) for request in requests]
    looks = (rank_many(np.array(requests, np.int64)) != rank_many(np.array(more, np.int64))).any()
    shares = tenant_shares(policy)
    served = ", ".join(f"{tokens:,.0f}" for tokens in shares.served)
    text = f"three tenants with constant demand got {served} tokens per unit of weight (maximum difference {shares.apart:,.0f})"
    if shares.fair:
        return Finding("fine", "tenants", f"{text}, within the bound of {shares.bound:,.0f}")
    text += f", beyond the bound of {shares.bound:,.0f}: service does not follow the weights"
    return Finding("error" if looks else "note", "tenants", text)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min"


def summary(name: str, outcome: ServerOutcome) -> dict[str, Any]:
    """One policy's results: percentiles in seconds, and the samples for the plot."""
    facts: dict[str, Any] = {"policy": name, "steps": outcome.steps, "seconds": float(outcome.ended.max() / 1e9)}
    for key, values in (("waiting_s", outcome.waiting_s), ("ttft_s", outcome.ttft_s), ("end_to_end_s", outcome.end_to_end_s)):
        facts[key] = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
        facts[f"{key}_samples"] = np.sort(values).round(4).tolist()
    facts["preemptions"] = int(outcome.preemptions.sum())
    facts["most_overtaken"] = max(outcome.overtakers())
    return facts


if __name__ == "__main__":
    run_trial(lambda options, source, send: Check(CheckOptions(**options), send).thorough())
