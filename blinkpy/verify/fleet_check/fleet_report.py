"""`blinkpy check --fleet`: simulate a fleet with each placement, and show what they do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from blinkpy.dpu.fleet.placement_rules import SHIPPED_RULES, load_rule
from blinkpy.process_exit import print_error
from blinkpy.progress import Progress
from blinkpy.scheduler.policy_vetting import vetted_policy
from blinkpy.verify.fleet_check.fleet_comparison import FleetFigures, compare
from blinkpy.verify.policy_check.check_options import CheckOptions
from blinkpy.verify.policy_check.timed_server import ServerModel, StuckError

POLICY = "short-prompts"  # where none is named
HEAD = ("workload", "placement", "TTFT P50", "P99", "prefix hits", "busiest/mean")


def run_fleet_check(options: CheckOptions) -> int:
    """Compare the placement that is named, and the shipped ones. Returns the exit code: 0, or 1 when requests never ended, or the
    placement failed for one. Raises ConfigError for wrong options."""
    named = options.placement
    rules = {**({named: load_rule(named)} if named else {}), **SHIPPED_RULES}
    policy = vetted_policy(options.policy or POLICY)
    machine = ServerModel.of(options)
    load: dict[str, Any] = {"requests": options.requests, "rate": options.rate, "seed": options.seed}
    progress, found = Progress(), list[FleetFigures]()
    errors = []
    try:
        for figures in compare(rules, policy, machine, options.fleet, **load, begin=lambda what: progress(f"simulating {what}")):
            found.append(figures)
    except StuckError as error:
        errors.append(str(error))
    finally:
        progress.close()
    errors += [f"{f.placement}, {f.workload}: failed for {f.faults:,} requests" for f in found if f.faults]
    print(_report(options, found, errors))
    if options.json:
        facts = {"options": dataclasses.asdict(options), "figures": [f._asdict() for f in found], "errors": errors}
        try:
            Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            print_error(f"can't write {options.json}: {error.strerror}")
    return int(bool(errors))


def _report(options: CheckOptions, found: list[FleetFigures], errors: list[str]) -> str:
    rows = [HEAD]
    for f in found:
        times = f"{f.ttft_p50:.3f}", f"{f.ttft_p99:.3f}"
        rows.append((f.workload, Path(f.placement).name, *times, f"{100 * f.hit_rate:.1f} %", f"{f.balance:.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]) for row in rows]
    load = f"{options.fleet} engines, {options.requests:,} requests of each workload, {options.rate:g}/s an engine; seconds:"
    end = [f"  ERROR  {error}" for error in errors] or ["no errors found"]
    return "\n".join([load, "", *table, "", *end])
