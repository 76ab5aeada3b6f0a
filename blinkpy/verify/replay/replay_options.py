"""Options of `blinkpy record` and `blinkpy replay`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import check_value, option


@dataclass(frozen=True)
class RecordOptions:
    """Save what a running engine has recorded. The file holds prompts and answers, as token ids."""

    name: str = option("", "name of the engine's segment (default: the only engine of this user that records)")
    output: str = option("", "file to write (default: blinkpy-NAME-TIME.recording)")


@dataclass(frozen=True)
class ReplayOptions:
    """Run a recording again, compare every decision with it, and tell what happened to each request and why."""

    file: str = option("", "a file of `blinkpy record`, or of a crash")
    policy: str = option("", "the policy that the engine had, if it was a file: FILE.py:FUNCTION")
    request: int = option(-1, "tell only of the request with this number (-1: of all)", low=-1, high=2**63 - 1)
    step: int = option(
        -1, "tell of the scheduler's turn with this number in full (-1: of all turns in short)", low=-1, high=2**63 - 1
    )
    trace: bool = option(True, "print what happened, a line for each event")
    compiled: bool = option(False, "run the scheduler compiled: faster for long recordings, after half a minute")
    workload: str = option("", "file for the lengths and times of the requests, as CSV for `blinkpy check --workload`")
    timeline: str = option("", "file for a picture of all requests over time (.svg, .html, or .png with matplotlib)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
