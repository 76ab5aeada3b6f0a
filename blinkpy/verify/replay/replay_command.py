"""`blinkpy record` and `blinkpy replay`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.packages import installed, require_packages
from blinkpy.transport.segment import FOLDER
from blinkpy.verify.replay.replay_options import RecordOptions, ReplayOptions


def run_record(options: RecordOptions) -> int:
    """Dump the recording of a running engine. Returns the exit code; raises ConfigError, in one line, when there is none."""
    from blinkpy.verify.recording.dump_file import write_dump
    from blinkpy.verify.recording.recording_links import LINK_PREFIX
    from blinkpy.verify.recording.recording_reader import RecordingReader
    from blinkpy.verify.replay.call_records import parse_calls

    name = options.name
    if not name:
        names = [path.name.removeprefix(LINK_PREFIX) for path in FOLDER.glob(f"{LINK_PREFIX}*") if path.exists()]
        if len(names) != 1:
            raise ConfigError(f"name the engine: {', '.join(sorted(names))}" if names else "no engine records on this machine")
        name = names[0]
    capture = RecordingReader(name).capture()
    calls = sum(1 for _ in parse_calls(capture.words, int(capture.description["limits"]["pairs"])))
    path = Path(options.output or f"blinkpy-{name}-{time.strftime('%Y%m%d-%H%M%S')}.recording")
    write_dump(path, capture, "asked for")
    size = path.stat().st_size / 2**20
    print(f"{calls:,} calls of the scheduler are in {path} ({size:.1f} MiB, prompts included); see them with")
    print(f"blinkpy replay {path}")
    return 0


def run_replay(options: ReplayOptions) -> int:
    """Replay a dump. Returns 0 when every decision is the recorded one, 1 when not. Raises ConfigError for a bad file."""
    require_packages("replay", "numba", extra="cpu")
    from blinkpy.sources import SCHEDULER, source_digest
    from blinkpy.verify.recording.dump_file import read_dump
    from blinkpy.verify.recording.recorded_policy import recorded_policy
    from blinkpy.verify.replay.narration import Narration
    from blinkpy.verify.replay.recorded_requests import RecordedRequests
    from blinkpy.verify.replay.replayer import Replay
    from blinkpy.verify.replay.timeline import Timeline

    picture = _picture_path(options.timeline)
    capture = read_dump(Path(options.file))
    about = capture.description
    if about.get("sources") != source_digest(SCHEDULER):
        print("blinkpy: this is not the version that made the recording: it may decide differently", file=sys.stderr)
    replay = Replay(capture, recorded_policy(about, options.policy), "njit" if options.compiled else "python")
    narration, timeline, requests = Narration(replay, options), Timeline(), RecordedRequests(replay.state)
    print(f"{options.file}: {about['reason']}, {about['written']}, {about.get('device', '')} engine, policy {about['policy']}")
    for call, differences in replay.run():
        narration.narrate(call, differences)
        timeline.take(call, replay.state)
        requests.take(call, replay.state)
    print(narration.verdict())
    if picture is not None:
        title = f"{Path(options.file).name}: {len(replay.calls):,} calls, {narration.span_s:.3f} s, policy {about['policy']}"
        with _written(picture):
            timeline.write(picture, title)
    if options.workload:
        with _written(options.workload):
            count = requests.write(Path(options.workload))
        print(f"{count:,} requests are in {options.workload}")
    return 1 if narration.different else 0


def _picture_path(name: str) -> Path | None:
    """Where the picture goes, if one is wanted. Raises ConfigError before the work for what would fail after it."""
    from blinkpy.verify.replay.timeline import SUFFIXES

    if not name:
        return None
    picture = Path(name)
    if picture.suffix not in SUFFIXES:
        raise ConfigError(f"timeline must end in {', '.join(SUFFIXES)}, not {name!r}")
    if picture.suffix == ".png" and not installed("matplotlib"):
        raise ConfigError("a .png timeline needs matplotlib: pip install 'blinkpy-serve[bench]' (.svg needs nothing)")
    return picture


@contextlib.contextmanager
def _written(path: Path | str) -> Iterator[None]:
    """Say in one line what could not be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
