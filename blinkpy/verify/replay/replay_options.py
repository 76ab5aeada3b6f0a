"""Options of `blinkpy record` and `blinkpy replay`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import check_engine_name, check_value, option


@dataclass(frozen=True)
class RecordOptions:
    """Save the recording of a running engine. The file contains prompts and outputs as token ids."""

    name: str = option("", "the engine's --name (default: your only engine that records)")
    output: str = option("", "file to write (default: blinkpy-NAME-TIME.recording)")

    def __post_init__(self) -> None:
        if self.name:
            check_engine_name(self.name)


@dataclass(frozen=True)
class ReplayOptions:
    """Run a recording again, compare every decision with it, and explain what happened to each request."""

    file: str = option("", "recording from `blinkpy record` or of a crash")
    policy: str = option("", "FILE.py:FUNCTION; required if the engine's policy came from a file")
    request: int = option(-1, "report only on the request with this number (-1: on all requests)", low=-1, high=2**63 - 1)
    step: int = option(
        -1, "report every detail of the scheduler turn with this number (-1: a summary of all turns)", low=-1, high=2**63 - 1
    )
    trace: bool = option(True, "print one line per event")
    compiled: bool = option(False, "compile the scheduler first, which takes half a minute; faster for long recordings")
    workload: str = option("", "CSV file to write with lengths and arrival times of the requests, for `blinkpy check --workload`")
    timeline: str = option("", "file for a timeline of all requests (.svg, .html, or .png with matplotlib)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
