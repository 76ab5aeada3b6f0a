"""Contexts of the parts' templates: decode steps, whole steps, CPU benchmarks, predictions, result files."""

import json
from pathlib import Path
from typing import Any

from benchmarks.common.harness import ROOT
from benchmarks.common.load import load_name
from benchmarks.report.words import milliseconds, number, percent, word

Document = dict[str, Any]
Rows = list[list[str]]
SHAPES = {"llama-3-8b": "Llama-3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
LEDGER = "simulated_turns"
STEPS, SCHEDULER = "decode-llama-3-8b", "decode-scheduler"
GRAMMARS = {"decode-llama-3-8b-grammar": "JSON objects", "decode-llama-3-8b-grammar-counted": "JSON objects with counted strings"}
CPU_ROWS = (  # file, how its target begins, what it is called here
    ("control_overhead", "scheduler call at 64 running, steady", "scheduler call with 64 requests, cold caches"),
    ("control_overhead", "scheduler call at 256 running, steady", "scheduler call with 256 requests, cold caches"),
    ("cpu_engine", "token rate of 16 streams", "demonstration model: token rate of 16 streams / 1 stream"),
    ("cpu_engine", "engine step to bare forward", "engine step / bare torch forward pass, 16 streams"),
    (
        "cpu_engine_since",
        "1 streams: rate of the engine before (old)",
        "token rate: older engine (torch, bfloat16) / engine without torch, 1 stream",
    ),
    ("cpu_engine_since", "16 streams: rate of the engine before (old)", "the same with 16 streams"),
    ("front_end_cpu", "CPU of a worker per token event", "front end: CPU time per token event, 64 streams"),
    (
        "rdma_cpu",
        "CPU of a request of 128 tokens",
        "front end over RDMA: CPU time per request of 128 tokens (without HTTP and card)",
    ),
    ("rdma_cpu", "CPU of a request of 4096 tokens", "the same with 4,096 tokens"),
    ("queue_round_trip", "round trip through the transport", "round trip over a queue pair"),
)
MAKERS = {  # of a result file, by the beginning of its name
    "decode-": "parts.decode_step",
    **dict.fromkeys(("paper-", "alone-", "schemas-", "repeats-", "steps-of-", "refactoring-"), "serving.grid"),
    "steps-": "parts.whole_steps",
    "drafts-": "parts.drafts",
    **dict.fromkeys(("heads-", "draft-limit-"), "parts.draft_heads"),
}
CHOICES = {  # names of the shown systems
    **{name: name for name in ("fcfs, 512", "fcfs, 2048", "fcfs, 8192", "short-prompts, 2048")},
    "short-prompts, 512 up to 4096 waiting, then 2048, 8192 for short prompts": "defaults",
}
MUTANTS = ("killed", "survived", "unknown")  # what becomes of them
MUST_DIE_EACH = 0.9  # share of a module's mutants, as in tools/mutants
LOAD = "16 requests/s"  # shown seed
LIKE_OTHERS = (  # omitted steps
    *(f"decode, {rows} rows at 256" for rows in (8, 32, 128)),
    *(f"30 rows at 1,100, chunk of {tokens}" for tokens in ("226", "418", "994", "4,066")),
    "a prompt of 512",
)
RULES_SHOWN = ("prefix", "least-loaded", "round-robin")  # of placement; the plot has all
PREDICTED = ("ttft_p50", "ttft_p99", "tpot_p99", "itl_p99", "itl_max", "e2e_mean")


class Results:
    """The result files of a folder, by name without .json."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = sorted(path.stem for path in folder.glob("*.json"))

    def read(self, name: str) -> Document:
        """A result; empty if it does not exist."""
        path = self.folder / f"{name}.json"
        found: Document = json.loads(path.read_text()) if path.exists() else {}
        return found

    def lines(self, name: str) -> list[Document]:
        """The lines of a ledger, NAME.jsonl; empty if it does not exist."""
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def by_shape(self, prefix: str) -> dict[str, Document]:
        """The results prefix-SHAPE by the shape's title; an empty one if it does not exist."""
        return {title: self.read(prefix + name) for name, title in SHAPES.items()}


def decode(results: Results) -> dict[str, Any]:
    """The decode step compared with the floor, for each shape, and the overhead of the loop."""
    shown = {title: found for title, found in results.by_shape("decode-").items() if found}
    if not shown:
        return {"shown": shown}
    rows = []
    for count in dict.fromkeys(count for found in shown.values() for count in found["rows"]):
        rows.append([count])
        for step in (found["rows"].get(count, {}) for found in shown.values()):
            times = [milliseconds(us) for us in (step["step_us"]["p50"], step["floor_us"])] if "step_us" in step else ["", ""]
            rows[-1] += [*times, percent(step["share_of_floor"]) if "step_us" in step else ""]
    steps = measured_steps(results)
    text = (
        f"Between two steps the scheduler's kernel takes {spread(steps, 'scheduler_us')} us, and the GPU waits "
        f"{spread(steps, 'gap_us')} us from one step's last kernel to the next one's first. In turns that admit or end requests "
        f"these times are {spread(steps, 'general_scheduler_us')} us and {spread(steps, 'general_gap_us')} us."
    )
    origins: dict[str, list[str]] = {}
    for title, found in shown.items():
        origins.setdefault(origin_of(found), []).append(f"{title} ({when(found)})")
    return {
        "shown": shown,
        "prompt": next(iter(shown.values()))["prompt"],
        "head": ["rows", *(word for title in shown for word in (f"{title} step, ms", "floor, ms", "share"))],
        "rows": rows,
        "text": text,
        "origins": " ".join(f"{'; '.join(runs)}: measured on {origin}." for origin, runs in origins.items()),
    }


def measured_steps(results: Results) -> list[Document]:
    """The decode steps of all shapes with times from within the loop."""
    files = results.by_shape("decode-").values()
    return [step for found in files for step in found.get("rows", {}).values() if "scheduler_us" in step]


def spread(steps: list[Document], what: str) -> str:
    """The smallest and the largest median."""
    values = [step[what]["p50"] for step in steps if what in step]
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def gap(results: Results) -> dict[str, Any]:
    """The time between two steps, and the scheduler's part of it, for a model's step and for one that does
    not use the caches.
    """
    shown: dict[str, dict[int, str]] = {}
    for name, what in (STEPS, "Llama-3-8B"), (SCHEDULER, "synthetic"):
        for count, step in results.read(name).get("rows", {}).items():
            if "gap_us" in step:
                shown.setdefault(what, {})[int(count)] = f"{step['gap_us']['p50']:.1f} ({step['scheduler_us']['p50']:.1f})"
    counts = sorted({count for times in shown.values() for count in times})
    rows = [[what, *(times.get(count, "") for count in counts)] for what, times in shown.items()]
    return {"head": ["us with rows", *(f"{count:,}" for count in counts)], "rows": rows}


def grammars(results: Results) -> dict[str, Any]:
    """Of each kind of grammar: how much longer decode steps with it in every row are, for one commit on one machine."""
    free, found = results.read(STEPS), []
    for name, what in GRAMMARS.items():
        bound = results.read(name)
        if not bound or free["environment"] != bound["environment"]:
            continue
        counts = [count for count in bound["rows"] if count in free["rows"]]
        longer = {int(n): bound["rows"][n]["step_us"]["p50"] / free["rows"][n]["step_us"]["p50"] - 1 for n in counts}
        found.append((what, [f"{percent(more, 1)} ({count:,})" for count, more in longer.items()], when(bound)))
    return {"found": found}


def steps(results: Results) -> dict[str, Any]:
    """Consecutive whole steps of each shape, with their power."""
    tables = []
    for title, found in results.by_shape("steps-").items():
        if found:
            gpu = found["results"]["gpu"]
            limit = f", power limit {gpu['power_limit_w']:.0f} W" if "power_limit_w" in gpu else ""
            where = f"{title}, {gpu['gpu']}{limit}; {found['arguments']['seconds']:g} s of each step; {when(found)}:"
            tables.append((where, [step_row(step) for step in found["results"]["steps"] if step_title(step) not in LIKE_OTHERS]))
    return {"tables": tables}


def cut_steps(results: Results) -> dict[str, Any]:
    """The cost of cut steps, and the wait of a latency-sensitive prompt: a row for each engine."""
    found = results.read("interrupted_steps")
    if not found:
        return {"rows": []}
    rows = []
    for engine in found["results"]["engines"]:
        waits = [word(engine["wait_ms"][level]["value"]) for level in ("p50", "p90", "p99")]
        uncut = engine["groups"] == 1
        cost = "" if uncut else percent(engine["cost"], 2)
        rows.append(["uncut" if uncut else str(engine["groups"]), f"{engine['step_ms']:.1f}", cost, *waits])
    title, arguments = SHAPES[found["results"]["shape"]], found["arguments"]
    gpu = f", {found['results']['gpu']}" if "gpu" in found["results"] else ""
    sizes = f"steps of at most {arguments['tokens']:,} tokens, {arguments['samples']} prompts for each engine"
    where = f"{title}{gpu}; {sizes}; {when(found)}:"
    head = ["groups", "step, ms", "cost", "a prompt's wait p50, ms", "p90", "p99"]
    return {"where": where, "head": head, "rows": rows}


def step_row(step: Document) -> list[str]:
    """The row of one step; missing values are empty."""
    watts = f"{step['mean_w']:,.0f}" if "mean_w" in step else ""
    return [step_title(step), f"{step['step_ms']:.3g}", watts, f"{step['tflop_per_s']:.0f}"]


def step_title(step: Document) -> str:
    """A description of a step's work."""
    lengths = step["prompts"]
    rows = f"{step['decodes']} row{'' if step['decodes'] == 1 else 's'} at {step['decode_context']:,}"
    if step["kind"] == "decode":
        return f"decode, {rows}"
    if step["kind"] == "prompts":
        return f"{len(lengths)} prompts of {lengths[0]:,}" if len(lengths) > 1 else f"a prompt of {lengths[0]:,}"
    behind = f" behind {step['cached']:,} cached" if step["cached"] else ""
    return f"{rows + ', ' if step['decodes'] else ''}chunk of {lengths[0]:,}{behind}"


def cpu(results: Results) -> dict[str, Any]:
    """Targets and measurements of the parts that need no GPU."""
    rows: Rows = []
    sources = {}
    for name, what, label in CPU_ROWS:
        found = results.read(name)
        for target in found.get("targets", ()):
            if target["what"].startswith(what):
                sources[name] = found
                sign, met = ("at most" if target["at_most"] else "at least"), "" if target["met"] else " (**missed**)"
                value, limit = (number(target[key], target["unit"]) for key in ("value", "limit"))
                rows.append([label, f"{value}{met}", f"{sign} {limit}"])
    shares = {name: percent(found["others"]["other_processes"]) for name, found in sources.items()}
    return {
        "rows": rows,
        "cores": " or ".join(dict.fromkeys(str(found["machine"]["cores"]) for found in sources.values())),
        "others": ", ".join(f"{share} in `{name}`" for name, share in shares.items() if share != percent(0)),
    }


def capacity(results: Results) -> dict[str, Any]:
    """Some predicted latencies under one load."""
    loads = []
    for load in results.read("capacity").get("results", {}).get("loads", ()):
        name = load_name(load["rate"], load["streams"])
        found = [row for row in load["choices"] if row["name"] in CHOICES]
        rows = [[CHOICES[row["name"]], *(f"{row[key]:g}" for key in PREDICTED)] for row in found]
        loads += [(name, load["requests"], rows)] if name == LOAD else []
    return {"loads": loads, "head": ["policy, step tokens", *(key.replace("_", " ") for key in PREDICTED)]}


def window_cache(results: Results) -> dict[str, Any]:
    """The memory saved by window rings, for each model."""
    found = results.read("window_cache").get("results", {})
    rows = []
    for model in found.get("models", ()):
        sizes = [f"{model[kind]['bytes'] / 2**30:.2f}" for kind in ("full", "ring")]
        fitting = [str(model[kind]["sequences"]) for kind in ("full", "ring")]
        windows = f"{model['with_window']} of {model['layers']}, {model['window']:,}"
        rows.append([model["model"], windows, *sizes, percent(model["saved"]), *fitting])
    head = ["model", "layers with a window, its tokens", "GiB, full", "GiB, ring", "saved", "sequences, full", "sequences, ring"]
    return {"head": head, "rows": rows}


def fleet(results: Results) -> dict[str, Any]:
    """Placements, a row for each workload and rule."""
    found = results.read("fleet_placement").get("results", {})
    rows = []
    for workload, placements in found.get("workloads", {}).items():
        for name, its in (one for one in placements.items() if one[0] in RULES_SHOWN):
            times = [f"{1000 * its[key]:.0f}" for key in ("ttft_p50", "ttft_p99")]
            rows.append([workload, name, *times, percent(its["hit_rate"], 1)])
    head = ["workload", "placement", "TTFT P50, ms", "P99", "prefix hits"]
    choices = results.read("placement_choice").get("results", {}).get("choices", [])
    costs = {"choice": "", "record": ""}
    for row in choices:
        if (row["engines"], row["prompt_tokens"]) == (4, 1000):
            costs = {part: number(row[part]["p50"]["value"], "us") for part in ("choice", "record")}
    return {
        "head": head,
        "rows": rows,
        "found": found,
        "throughput": added_up(results),
        "kills": kills(results),
        "rdma": rdma_kills(results),
        **costs,
    }


def added_up(results: Results) -> dict[str, Any] | None:
    """The throughput of several engines with one worker: relative to as many times one engine, and the
    worker's maximum.
    """
    found = results.read("fleet_throughput")
    if not found:
        return None
    first, last = found["results"]["paced"][0], found["results"]["paced"][-1]
    times = last["tokens_per_s"] / first["tokens_per_s"] * first["engines"]
    most = max(found["results"]["fast"], key=lambda row: row["tokens_per_s"])
    shares = {"times": f"{times:.2f}", "core": percent(most["worker_core_share"]), "when": when(found)}
    return {**shares, "engines": last["engines"], "most": f"{most['tokens_per_s']:,.0f}"}


def kills(results: Results) -> dict[str, Any] | None:
    """Engines that were killed under streams."""
    found = results.read("fleet_kills")
    if not found:
        return None
    signals = found["results"]["signals"].values()
    pause = max(one["pause_beyond_detection_s"]["max"] for one in signals)
    return {**found["results"], "pause": number(pause, "s"), "hardware": hardware(found), "when": when(found)}


def rdma_kills(results: Results) -> dict[str, Any] | None:
    """Engines that were killed, stopped or cut off over RDMA, under streams."""
    found = results.read("fleet_kills_rdma")
    if not found:
        return None
    kinds = found["results"]["kinds"]
    pause = max(one["pause_beyond_detection_s"]["max"] for one in kinds.values())
    counts = ", ".join(f"{kind} {one['count']}" for kind, one in kinds.items())
    return {
        **found["results"],
        "counts": counts,
        "streams": found["arguments"]["streams"],
        "pause": number(pause, "s"),
        "when": when(found),
    }


def quantised(results: Results) -> dict[str, Any]:
    """The perplexity cost of FP8 weights, for each dtype."""
    found = results.read("quantised_perplexity").get("results", {})
    rows = []
    for dtype, model in found.get("models", {}).get("demo", {}).items():
        value, low, high = (f"{100 * model['worse'][key]:.2f} %" for key in ("value", "low", "high"))
        rows.append([dtype, f"{model['unquantised']:.2f}", f"{model['fp8']:.2f}", f"{value} ({low} to {high})"])
    return {"head": ["computed in", "unquantised", "`--quantization fp8`", "worse by (95 % interval)"], "rows": rows}


def files(results: Results) -> dict[str, Any]:
    """The result files, each with its origin."""
    rows = []
    for name in results.names:
        found = results.read(name)
        also = " ".join(f"`{suffix}`" for suffix in (".png", ".md") if (results.folder / f"{name}{suffix}").exists())
        rows.append([f"`{name}.json`{', ' + also if also else ''}", maker(name, found), hardware(found), when(found)])
    return {"rows": rows}


def simulated_turns(results: Results, mode: str) -> int:
    """Number of the ledger's turns in a mode of the simulator."""
    return sum(line["calls"] for line in results.lines(LEDGER) if line["mode"] == mode)


def simulated(results: Results) -> dict[str, Any]:
    """The simulator's ledger: a row for each mode and commit."""
    groups: dict[tuple[str, str], list[Document]] = {}
    for line in results.lines(LEDGER):
        groups.setdefault((line["mode"], line["commit"]["hash"][:7]), []).append(line)
    rows = []
    for (mode, commit), lines in groups.items():
        counts = [f"{sum(line[name] for line in lines):,}" for name in ("calls", "judged", "in_lanes")]
        rows.append([mode, *counts, f"{max(line['date'] for line in lines)[:10]}, `{commit}`"])
    return {"rows": rows}


def mutants(results: Results) -> dict[str, Any]:
    """The outcomes of the mutants, and the modules with too many survivors."""
    found = results.read("mutants")
    if not found:
        return {"total": None}
    total = {name: f"{sum(group[name] for group in found['groups'].values()):,}" for name in MUTANTS}
    weak = []
    for file, module in found["modules"].items():
        hunted = module["killed"] + module["survived"]
        if module["killed"] < MUST_DIE_EACH * hunted:
            weak.append(f"`{file}` {module['killed']} of {hunted}")
    return {"total": total, "share": between(found), "weak": weak, "when": when(found)}


def mutants_of_parts(results: Results) -> dict[str, Any]:
    """The samples of mutants outside of the verified core, by part."""
    samples = Results(results.folder / "mutants_of_parts")
    rows = []
    for name in samples.names:
        found = samples.read(name)
        hunted = found["killed"] + found["survived"]
        rows.append([name, f"{found['killed']} of {hunted}", between(found), str(found["seed"]), when(found)])
    return {"rows": rows}


def between(counts: dict[str, Any]) -> str:
    """The share of killed mutants, with its confidence interval."""
    hunted = counts["killed"] + counts["survived"]
    low, high = counts["interval"]
    return f"{percent(counts['killed'] / hunted, 1)} ({100 * low:.1f} to {100 * high:.1f})" if hunted else ""


def maker(name: str, found: Document) -> str:
    """The command that writes a result file, by the file's name or its own entry; its benchmark may have been
    removed.
    """
    if name in (
        "fuzz_schemas",
        "fuzz_http",
        "fuzz_hostile",
        "soak",
        "mutants",
        "rolling_upgrade",
        "fleet_kills",
        "fleet_kills_rdma",
    ):
        return f"`make {name.replace('_', '-')}`"
    known = [module for start, module in MAKERS.items() if name.startswith(start)]
    known += [f"{path.parent.name}.{name}" for path in (ROOT / "benchmarks").glob(f"*/{name}.py")]
    written = str(found.get("benchmark", ""))  # FOLDER.NAME; older files have another name
    known += [written] if (ROOT / "benchmarks" / f"{written.replace('.', '/')}.py").is_file() else []
    return f"`python -m benchmarks.{known[0]}`" if known else "a benchmark of that commit"


def hardware(found: Document) -> str:
    """The hardware of a result's measurement."""
    gpu = found.get("environment", {}).get("gpu") or (found.get("results") or {}).get("gpu", "")
    gpu = gpu.get("gpu") if isinstance(gpu, dict) else gpu  # a few words on it, or its name
    return gpu or f"{found['machine']['cores']} cores, {found['machine']['cpu']}"


def when(found: Document) -> str:
    """Date and commit of a result."""
    origin = found.get("environment", found)
    changed = " with changes" if origin["commit"].get("dirty") else ""
    return f"{origin['date'][:10]}, `{origin['commit'].get('hash', 'unknown')[:7]}`{changed}"


def origin_of(found: Document) -> str:
    """Machine and versions of a result that was measured only on a GPU."""
    environment = found["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "numba"))
    return f"{environment['gpu']}, driver {environment['driver'].split()[0]}, {versions}"
