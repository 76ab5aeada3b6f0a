"""`make fleet-kills-rdma`: repeatedly kill or stop one of two engines over RDMA, or cut its link, under
streams.

Runs in the virtual machine of `make test-rdma`, with Soft-RoCE. The engines have the null device; one is
reached over a wire that can be cut. Clients request one stream after another from a front end. Engine,
signal, direction of the cut and moment are random. A killed engine is restarted, a stopped engine
continues, and a cut wire is repaired before the next disturbance. Each client must get exactly the text
of its seed (tests/rdma/disturbed_fleet.py). Disturbances that moved no request are not counted. At the
end, no slot, page, segment, stray completion or refused move may be left.

A pause is the longest silence of any stream, after the front end has given up the engine. It is measured
on an emulated processor, which is ten to thirty times slower than this machine.
"""

import json
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rdma.vm import suite

from benchmarks.common.harness import Flag, Run, check, run_benchmark

START_S, EACH_S = 900.0, 60.0  # of the virtual machine: for all that starts and ends in it, and for a disturbance, at most


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind: the number of disturbances, the number of moved requests, and times in s."""
    result: dict[str, Any] = {}
    for kind in sorted({one["kind"] for one in found}):
        its = [one for one in found if one["kind"] == kind]
        times = {
            "noticed_s": [one["noticed_s"] for one in its],
            "silence_s": [one["silence_s"] for one in its],
            "pause_beyond_detection_s": [one["silence_s"] - one["noticed_s"] for one in its],
        }
        result[kind] = {"count": len(its), "moved": sum(one["moved"] for one in its)} | {
            name: {"median": round(statistics.median(values), 3), "max": round(max(values), 3)} for name, values in times.items()
        }
    return result


def disturb_all(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"--seed {options.seed}", flush=True)
    suite.prepare()
    suite.compile_host_code()
    with tempfile.TemporaryDirectory(prefix="rdma-fleet-") as out:
        asked = [word for name in ("count", "streams", "seed") for word in (f"--{name}", str(getattr(options, name)))]
        program = [sys.executable, "-m", "rdma.disturbed_fleet", *asked, "--output", "/guest_out/disturbances"]
        code = suite.run_inside(program, limit_s=START_S + EACH_S * options.count, out=Path(out))
        check(code == 0, f"it failed in the virtual machine, with code {code}")
        calm, *each, end = map(json.loads, Path(out, "disturbances").read_text().splitlines())
    counted = [one for one in each if one["moved"]]
    run.target("disturbances with every answer right", len(counted), 200, "", at_most=False)
    run.target("streams at a time", options.streams, 64, "", at_most=False)
    results = {"disturbances": len(counted), "least_running": min(one["running"] for one in counted), "wrong_answers": 0}
    run.write(__doc__, results | calm | end | {"kinds": summary(counted)})


if __name__ == "__main__":
    run_benchmark(
        "tools.fleet_kills_rdma",
        "An engine of two is killed, stopped or cut off, over RDMA and under streams.",
        disturb_all,
        count=Flag(200, "disturbances that move requests", smoke=3),
        streams=Flag(64, "at a time"),
        seed=Flag(0, "of all; 0: a random one"),
    )
