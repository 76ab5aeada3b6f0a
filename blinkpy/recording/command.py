"""`blinkpy record` and `blinkpy replay`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.dpu.segment import FOLDER
from blinkpy.recording.options import RecordOptions, ReplayOptions


def run_record(options: RecordOptions) -> int:
    """Dump the recording of a running engine. Returns the exit code; raises ConfigError, in one line, when there is none."""
    from blinkpy.recording.file import write_dump
    from blinkpy.recording.links import LINK_PREFIX
    from blinkpy.recording.reader import RecordingReader
    from blinkpy.recording.records import parse_calls

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
    _need_numba()
    from blinkpy.recording.file import read_dump, source_digest
    from blinkpy.recording.replay import Replay
    from blinkpy.recording.requests import Requests
    from blinkpy.recording.timeline import SUFFIXES, Timeline
    from blinkpy.recording.trace import Tracer

    picture = Path(options.timeline) if options.timeline else None
    if picture is not None:
        if picture.suffix not in SUFFIXES:
            raise ConfigError(f"timeline must end in {', '.join(SUFFIXES)}, not {options.timeline!r}")
        if picture.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("a .png timeline needs matplotlib: pip install 'blinkpy-serve[bench]' (.svg needs nothing)")
    capture = read_dump(Path(options.file))
    about = capture.description
    if about.get("sources") != source_digest():
        print("blinkpy: this is not the version that made the recording: it may decide differently", file=sys.stderr)
    replay = Replay(capture, _policy(options, about), "njit" if options.compiled else "python")
    tracer, timeline, requests = Tracer(replay.limits, replay.state), Timeline(), Requests(replay.state)
    print(f"{options.file}: {about['reason']}, {about['written']}, {about.get('device', '')} engine, policy {about['policy']}")
    begin = replay.calls[0].now_ns if replay.calls else 0
    different = 0
    for call, differences in replay.run():
        for event in tracer.after(call):
            wanted = options.step in (-1, call.number) and options.request in (-1, event.request)
            if options.trace and wanted:
                who = f"#{event.request}" if event.request >= 0 else ""
                print(f"{(event.now_ns - begin) / 1e6:12.3f} ms  call {event.call:<8} {who:>8}  {event.kind:<9} {event.text}")
        if options.step == call.number:
            _print_call(call, replay)
        if differences:
            different += 1
            if different <= 10:
                print(f"call {call.number} differs: {'; '.join(differences)}")
        timeline.take(call, replay.state)
        requests.take(call, replay.state)
        tracer.before()
    total = len(replay.calls)
    span = (replay.calls[-1].now_ns - begin) / 1e9 if total else 0.0
    if different:
        print(f"{different:,} of {total:,} calls decided differently from the recording, over {span:.3f} s")
    else:
        print(f"all {total:,} calls decided as recorded, over {span:.3f} s")
    if picture is not None:
        try:
            timeline.write(picture, f"{Path(options.file).name}: {total:,} calls, {span:.3f} s, policy {about['policy']}")
        except OSError as error:
            raise ConfigError(f"can't write {picture}: {error.strerror}") from error
    if options.workload:
        try:
            count = requests.write(Path(options.workload))
        except OSError as error:
            raise ConfigError(f"can't write {options.workload}: {error.strerror}") from error
        print(f"{count:,} requests are in {options.workload}")
    return 1 if different else 0


def _print_call(call: Any, replay: Any) -> None:
    """One call in full."""
    requests = replay.state.requests
    print(f"call {call.number}: bucket {call.bucket}, {call.free} pages free, {call.cached} cached")
    for pair, (heartbeat, claim, head, doorbell) in enumerate(call.inbox.tolist()):
        print(f"  queue pair {pair}: heartbeat {heartbeat}, claim {claim}, completions read {head:#x}, doorbell {doorbell:#x}")
    for slot, tokens in call.planned.tolist():
        request, end, length = int(requests.arrival[slot]), int(requests.computed[slot]) + tokens, int(requests.length[slot])
        print(f"  row of #{request}, slot {slot}: {tokens} tokens, up to {end} of {length}")


def policy_facts(name: str, policy: Any) -> dict[str, str]:
    """What a recording says about its policy: the name, and a digest of the file it came from."""
    from blinkpy.kernels.policies import SHIPPED

    digest = ""
    if name not in SHIPPED:
        digest = hashlib.sha256(Path(policy.__code__.co_filename).read_bytes()).hexdigest()
    return {"policy": name, "policy_digest": digest}


def _policy(options: ReplayOptions, about: dict[str, Any]) -> Any:
    """The recording's policy. A user's own is not in the file: code in a recording would run on whoever opens it."""
    from blinkpy.check.guard import vetted_policy
    from blinkpy.kernels.policies import SHIPPED

    name = str(about.get("policy", ""))
    if name in SHIPPED:
        if options.policy not in ("", name):
            raise ConfigError(f"the recording was made with the policy {name}, not {options.policy}")
        return SHIPPED[name]
    if not options.policy:
        raise ConfigError(f"the recording was made with the policy {name}: give it with --policy FILE.py:FUNCTION")
    policy = vetted_policy(options.policy)
    if policy_facts(options.policy, policy)["policy_digest"] != about.get("policy_digest"):
        print(f"blinkpy: {options.policy} is not the file that the engine had: it may decide differently", file=sys.stderr)
    return policy


def _need_numba() -> None:
    if importlib.util.find_spec("numba") is None:
        raise ConfigError("replay needs numba: pip install 'blinkpy-serve[cpu]'")
