"""Options of `blinkpy record` and `blinkpy replay`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import check_engine_name, check_value, option


@dataclass(frozen=True)
class RecordOptions:
    """Save what a running engine has recorded. The file holds prompts and answers, as token ids."""

    name: str = option("", "the engine's segment (default: the only one of this user that records)")
    output: str = option("", "file to write (default: blinkpy-NAME-TIME.recording)")

    def __post_init__(self) -> None:
        if self.name:
            check_engine_name(self.name)


@dataclass(frozen=True)
class ReplayOptions:
    """Run a recording again, compare every decision with it, and tell what happened to each request and why."""

    file: str = option("", "of `blinkpy record`, or of a crash")
    policy: str = option("", "FILE.py:FUNCTION, if the engine's policy was a file")
    request: int = option(-1, "tell only of this request (-1: of all)", low=-1, high=2**63 - 1)
    step: int = option(-1, "tell of this turn of the scheduler in full (-1: of all in short)", low=-1, high=2**63 - 1)
    trace: bool = option(True, "print a line for each event")
    compiled: bool = option(False, "run the scheduler compiled: faster for long recordings, after half a minute")
    workload: str = option("", "lengths and times of the requests, as CSV for `blinkpy check --workload`")
    timeline: str = option("", "picture of all requests over time (.svg, .html, or .png with matplotlib)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
