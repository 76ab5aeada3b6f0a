"""What classes are worth: latency-sensitive requests beside bursts of best-effort ones, in simulated time.

    python -m benchmarks.tuning.class_capacity --choice step_groups=63,best_effort_step_tokens=1024 --seeds 1 2

The load is that of benchmarks.serving.classes, and the figures are those: first without classes, then with classes between steps,
then with each choice, which names options of `serve`. The scheduler is the real one, the times of steps are those of
benchmarks.tuning.capacity, and border_us is added between two groups of a step that is cut; an arrival is seen at a group's end.
Requests wait for a slot, the latency-sensitive ones first; flex_slots are for best effort at most.
"""

import argparse
import dataclasses
import sys
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import rounded
from benchmarks.common.harness import ROOT, Flag, Run, UsageError, main, parser, table
from benchmarks.serving.workload import DATA_SETS, SENSITIVE, Bursts, read_dataset, two_classes
from benchmarks.tuning.capacity import StepTimes, TimedMachine, read_decode, requests_of
from blinkpy.config import CUT_STEP_TOKENS, SUSPEND_STEPS
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import TimedSimulation

SHORT_PROMPT = 512  # tokens, of the latency-sensitive requests whose TTFT counts
COLUMNS = ("ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p99", "throughput", "turnaround", "suspensions")
BASE: dict[str, Any] = {"mixed_step_tokens": 512, "burst_step_tokens": 2048, "cut_step_tokens": CUT_STEP_TOKENS}


def serve_classes(server: TimedSimulation, urgent: NDArray[np.bool_], flex_slots: int, window_ns: int) -> NDArray[np.int64]:
    """Run a server until all its requests have ended. urgent: which are latency-sensitive. Returns the tokens of each that it had
    by window_ns."""
    doors: tuple[deque[int], deque[int]] = deque(), deque()
    n, arrived, flexible, got = len(server.requests), 0, 0, server.generated.copy()
    while server.ended < n:
        while arrived < n and server.due[arrived] <= server.now:
            doors[0 if urgent[arrived] else 1].append(arrived)
            arrived += 1
        while server.free and (doors[0] or (doors[1] and flexible < flex_slots)):
            door = doors[0] or doors[1]
            flexible += door is doors[1]
            server.submit(door.popleft())
        if not server.turn():
            server.now = max(server.now + 1_000_000, int(server.due[arrived]) if arrived < n else 0)
        flexible -= sum(not urgent[number] for number in server.over)
        if server.now <= window_ns:
            got = server.generated.copy()
    return got


def figures(
    machine: TimedMachine, requests: Workload, urgent: NDArray[np.bool_], classes: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Of one choice. Times in ms, throughput in tokens of best effort a second. classes: whether the engine is told of them."""
    words = {"best_effort": np.where(urgent, 0, 1)} if classes else {}
    server = TimedSimulation(SHIPPED["short-prompts"], machine, requests, words, most_slots=options.slots)
    flex = options.flex_slots if classes else options.slots
    got = serve_classes(server, urgent & classes, flex, int(1e9 * options.seconds))
    out, long = server.outcome, urgent & (requests.output > 1)
    ttft = 1000 * out.ttft_s[urgent & (requests.prompt <= SHORT_PROMPT)] + machine.times.outside_ms
    tpot = (out.ended - out.first_token)[long] / (requests.output[long] - 1) / 1e6
    found: dict[str, float] = {
        f"{name}_p{level}": float(np.percentile(times, level))
        for name, times in (("ttft", ttft), ("tpot", tpot))
        for level in (50, 90, 99)
    }
    found["throughput"] = got[~urgent].sum() / options.seconds
    found["turnaround"] = 1000 * out.end_to_end_s[~urgent].mean()
    found["suspensions"] = server.counter("suspensions")
    return {name: rounded(float(value)) for name, value in found.items()}


def machine_of(choice: str, options: argparse.Namespace, times: StepTimes) -> TimedMachine:
    """Raises UsageError for an option that the model lacks."""
    sizes = BASE | {name: getattr(options, name) for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages")}
    sizes |= {"suspend_steps": SUSPEND_STEPS, "cut_step_tokens": 0, "border_us": options.border_us}
    known = {field.name: field.type for field in dataclasses.fields(TimedMachine)}
    for word in choice.split(",") if choice else []:
        name, _, value = word.partition("=")
        try:
            sizes[name] = (float if known[name] is float else int)(value)
        except (KeyError, ValueError) as error:
            raise UsageError(f"--choice {choice}: {word} is not an option of a server, with a number") from error
    return TimedMachine(**sizes, times=times)


def offered(options: argparse.Namespace, seed: int) -> tuple[Workload, NDArray[np.bool_]]:
    """The requests, and which of them are latency-sensitive."""
    count, prompt, answer = (int(word) for word in options.burst.split(":"))
    bursts = Bursts(count, prompt, answer, options.burst_every_s)
    data = read_dataset(options.data, options.max_model_len)
    requests = two_classes(data, options.rate, options.seconds, options.sensitive, bursts, seed, 2)
    due = np.array([request.due for request in requests])
    lengths = np.array([(len(request.prompt), request.max_tokens) for request in requests])
    return requests_of(due, lengths[:, 0], lengths[:, 1]), np.array([request.tier == SENSITIVE for request in requests])


def compared(requests: Workload, urgent: NDArray[np.bool_], options: argparse.Namespace, progress: Any) -> list[dict[str, Any]]:
    """Each choice under one load. Throughput and turnaround are those over one class."""
    times = StepTimes(read_decode(ROOT / "benchmarks" / "results" / "decode-llama-3-8b.json", StepTimes.context_ns))
    found = list[dict[str, Any]]()
    names = ["one class", "between steps", *options.choice]
    for i, name in enumerate(names):
        progress(name, i, len(names))
        machine = machine_of(name if i > 1 else "", options, times)
        found.append({"name": name} | figures(machine, requests, urgent, i > 0, options))
    for ratio in ("throughput", "turnaround"):
        first = found[0][ratio]
        for one in found:
            one[ratio] = rounded(one[ratio] / first) if first else 1.0
    return found


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        smoke = {"seconds": 4.0, "seeds": [1], "data": "fixed:300:12", "burst": "4:900:8", "burst_every_s": 2.0, "rate": 6.0}
        vars(options).update(smoke)
    run, rows, loads = Run("tuning.class_capacity", options), list[list[str]](), list[dict[str, Any]]()
    for seed in options.seeds:
        requests, urgent = offered(options, seed)
        if not (urgent & (requests.prompt <= SHORT_PROMPT)).any() or urgent.all():
            raise UsageError("no short request of one of the classes comes; use more seconds or another seed")
        found = compared(requests, urgent, options, run.progress)
        loads.append({"seed": seed, "requests": len(requests), "latency_sensitive": int(urgent.sum()), "choices": found})
        rows += [[str(seed), one["name"], *(f"{one[name]:g}" for name in COLUMNS)] for one in found]
    run.write(__doc__, {"loads": loads})
    print(table(["seed", "choice", *(name.replace("_", " ") for name in COLUMNS)], rows))


def options() -> argparse.Namespace:
    result = parser(
        "tuning.class_capacity",
        "What classes are worth, predicted from the times of steps.",
        rate=Flag(16.0, "requests a second, without the bursts"),
        sensitive=Flag(0.2, "share of these that is latency-sensitive"),
        burst_every_s=Flag(30.0, "from one burst to the next"),
        seconds=Flag(120.0, "of arrivals"),
        slots=Flag(512, "requests in the engine"),
        flex_slots=Flag(384, "those of best effort"),
        border_us=Flag(18.0, "time of the turn between two groups of a step"),
        max_num_seqs=Flag(256),
        max_num_batched_tokens=Flag(8192),
        max_model_len=Flag(8192, "longer sequences of the data are left out"),
        page_size=Flag(16),
        num_pages=Flag(45_000, "of the KV cache"),
    )
    result.add_argument("--choice", nargs="*", default=["step_groups=63"], metavar="OPTION=N,...", help="options of serve")
    result.add_argument("--seeds", type=int, nargs="+", default=[1], help="of lengths, classes and arrivals")
    result.add_argument("--data", default="azure", help=DATA_SETS)
    result.add_argument("--burst", default="64:4000:64", metavar="REQUESTS:IN:OUT", help="of best effort, all at once")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
