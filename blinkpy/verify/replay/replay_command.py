"""`blinkpy record` and `blinkpy replay`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.packages import require_packages
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.transport.segment import FOLDER
from blinkpy.verify.replay.replay_options import RecordOptions, ReplayOptions
from blinkpy.verify.replay.replayer import Turn

HEAD = "arrival_s,prompt_tokens,generated_tokens,max_tokens,priority"


@dataclass(order=True)
class Seen:
    """A recorded request.

    generated: tokens so far. If the request ended and its slot was reused in the same turn, the last token is
        missing.
    """

    arrival: int  # arrival number
    arrived_ns: int
    prompt: int
    max_tokens: int
    priority: int
    generated: int = 0


class RecordedRequests:
    """Collects the accepted requests of a replay: call `take` after each turn. state: before the first
    turn.
    """

    def __init__(self, state: State) -> None:
        self._first = state.counts[S.ARRIVALS]
        self._seen: dict[tuple[int, int], Seen] = {}  # by slot and id

    def take(self, turn: Turn, state: State) -> None:
        r = state.requests
        for slot in np.flatnonzero(r.request_id).tolist():
            key = slot, int(r.request_id[slot])
            if r.status[slot] in (S.WAITING, S.RUNNING) and r.arrival[slot] >= self._first and key not in self._seen:
                words = r.entry[slot, [WORD_MAX_TOKENS, WORD_PRIORITY]].tolist()
                self._seen[key] = Seen(int(r.arrival[slot]), turn.now_ns, int(r.prompt_length[slot]), *words)
            if key in self._seen:
                self._seen[key].generated = max(0, int(r.length[slot] - r.prompt_length[slot]))

    def write(self, path: Path) -> int:
        """Write the CSV file, without requests that have no token. Returns their number. Raises OSError."""
        chosen = sorted(seen for seen in self._seen.values() if seen.generated > 0)
        lines = [HEAD]
        for seen in chosen:
            arrival_s = (seen.arrived_ns - chosen[0].arrived_ns) / 1e9
            lines.append(f"{arrival_s:.6f},{seen.prompt},{seen.generated},{seen.max_tokens},{seen.priority}")
        path.write_text("\n".join(lines) + "\n")
        return len(chosen)


def run_record(options: RecordOptions) -> int:
    """Dump the recording of a running engine. Returns the exit code. Raises ConfigError if no engine records."""
    from blinkpy.recording.dump_file import write_dump
    from blinkpy.recording.recording_layout import LINK_PREFIX
    from blinkpy.recording.recording_reader import RecordingReader
    from blinkpy.verify.replay.replayer import parse_turns

    name = options.name
    if not name:
        names = [path.name.removeprefix(LINK_PREFIX) for path in FOLDER.glob(f"{LINK_PREFIX}*") if path.exists()]
        if len(names) != 1:
            raise ConfigError(
                f"several engines record; give one name: {', '.join(sorted(names))}"
                if names
                else "no engine records on this machine"
            )
        name = names[0]
    capture = RecordingReader(name).capture()
    turns = sum(1 for _ in parse_turns(capture.words, int(capture.description["limits"]["pairs"])))
    path = Path(options.output or f"blinkpy-{name}-{time.strftime('%Y%m%d-%H%M%S')}.recording")
    write_dump(path, capture, "asked for")
    size = path.stat().st_size / 2**20
    print(f"{turns:,} turns of the scheduler are in {path} ({size:.1f} MiB, prompts included); see them with")
    print(f"blinkpy replay {path}")
    return 0


def run_replay(options: ReplayOptions) -> int:
    """Replay a dump. Returns 0 if every decision equals the recorded one, else 1. Raises ConfigError for an
    invalid file.
    """
    require_packages("replay", "numba", extra="cpu")
    from blinkpy.recording.dump_file import read_dump
    from blinkpy.scheduler.policy_vetting import recorded_policy
    from blinkpy.sources import SCHEDULER, source_digest
    from blinkpy.verify.replay.replay_command import RecordedRequests
    from blinkpy.verify.replay.replayer import Replay
    from blinkpy.verify.replay.timeline import SUFFIXES, Timeline, narrate

    picture, workload = Path(options.timeline), Path(options.workload)
    if options.timeline and picture.suffix not in SUFFIXES:
        raise ConfigError(f"timeline must end in {', '.join(SUFFIXES)}, not {options.timeline!r}")
    if picture.suffix == ".png":
        require_packages("a .png timeline (unlike .svg)", "matplotlib", extra="bench")
    capture = read_dump(Path(options.file))
    about = capture.description
    if about.get("sources") != source_digest(SCHEDULER):
        print("blinkpy: this is not the version that made the recording: it may decide differently", file=sys.stderr)
    replay = Replay(capture, recorded_policy(about, options.policy), "njit" if options.compiled else "python")
    timeline, requests, different = Timeline(), RecordedRequests(replay.state), 0
    print(f"{options.file}: {about['reason']}, {about['written']}, {about.get('device', '')} engine, policy {about['policy']}")
    if replay.turns and not replay.turns[-1].ended:
        print(f"turn {replay.turns[-1].number}, the last one, did not end: its inputs are replayed")
    for turn, differs in narrate(replay, options):
        different += differs
        if not replay.failed:
            timeline.take(turn, replay.state)
            requests.take(turn, replay.state)
    total = len(replay.turns)
    span_s = (replay.turns[-1].now_ns - replay.turns[0].now_ns) / 1e9 if replay.turns else 0.0
    verdict = f"{different:,} of {total:,} turns decided differently from the recording" if different else ""
    print(f"{verdict or f'all {total:,} turns decided as recorded'}, over {span_s:.3f} s")
    try:
        if options.timeline:
            timeline.write(picture, f"{Path(options.file).name}: {total:,} turns, {span_s:.3f} s, policy {about['policy']}")
        if options.workload:
            print(f"{requests.write(workload):,} requests are in {workload}")
    except OSError as error:
        raise ConfigError(f"can't write {error.filename}: {error.strerror}") from error
    return 1 if different else 0
