"""`blinkpy record` and `blinkpy replay`."""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.packages import require_packages
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.tool_options import RecordOptions, ReplayOptions
from blinkpy.transport.segment import FOLDER
from blinkpy.verify.replay.replayer import Replay, Turn
from blinkpy.verify.replay.request_events import EventTracer

# A picture of a recording as SVG or HTML: one line per request, coloured by its state.

MOST_DIFFERENCES = 10  # maximum turns shown with differences; further turns are only counted


def narrate(replay: Replay, options: ReplayOptions) -> Iterator[tuple[Turn, bool]]:
    """Run a replay and print the details that the options select. Yields each turn, and whether it decided
    differently from the recording.
    """
    tracer, different, begin_ns = EventTracer(replay.limits, replay.state), 0, replay.turns[0].now_ns if replay.turns else 0
    for turn, differences in replay.run():
        for event in () if replay.failed else tracer.events_of(turn):
            if options.trace and options.step in (-1, turn.number) and options.request in (-1, event.request):
                at_ms, request = (turn.now_ns - begin_ns) / 1e6, f"#{event.request}" if event.request >= 0 else ""
                print(f"{at_ms:12.3f} ms  turn {turn.number:<8} {request:>8}  {event.kind:<9} {event.text}")
        if options.step == turn.number:
            _print_turn(turn, replay.state)
        different += bool(differences)
        if differences and different <= MOST_DIFFERENCES:
            print(f"turn {turn.number} differs: {'; '.join(differences)}")
        yield turn, bool(differences)


def _print_turn(turn: Turn, state: State) -> None:
    """Print every detail of one turn."""
    requests = state.requests
    print(f"turn {turn.number}: bucket {turn.bucket}, {turn.free} pages free, {turn.cached} cached")
    for pair, (heartbeat, claim, head, doorbell) in enumerate(turn.inbox.tolist()):
        print(f"  queue pair {pair}: heartbeat {heartbeat}, claim {claim}, completions read {head:#x}, doorbell {doorbell:#x}")
    for slot, tokens in turn.planned.tolist():
        end = requests.computed[slot] + tokens
        print(f"  row of #{requests.arrival[slot]}, slot {slot}: {tokens} tokens, up to {end} of {requests.length[slot]}")


COLOURS = {
    "waiting": "#d9d9d9",
    "prefill": "#4c78a8",
    "decoding": "#72b7b2",
    "stalled": "#f2cf5b",
    "preempted": "#e45756",
    "suspended": "#b279a2",
}
SUFFIXES = (".svg", ".html", ".png")
MOST_REQUESTS = 2000
ROW, BAR, LEFT, WIDTH, TOP = 14, 10, 70, 1000, 40  # pixels
TICKS = 8


@dataclass
class Span:
    """A period of a request in one state, between the starts of two turns; ns."""

    request: int
    what: str
    begin: int
    end: int


class Timeline:
    """Collects spans during a replay: call `take` after each turn."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[int, Span] = {}

    def take(self, turn: Turn, state: State) -> None:
        requests, now = state.requests, turn.now_ns
        tokens = dict(turn.planned.tolist())
        seen = set()
        for slot in np.flatnonzero((requests.status == S.RUNNING) | (requests.status == S.WAITING)).tolist():
            request = int(requests.arrival[slot])
            seen.add(request)
            if requests.status[slot] == S.WAITING:
                what = "preempted" if requests.preemptions[slot] else "waiting"
            elif requests.stalled[slot] == S.STALLED:
                what = "stalled"
            elif turn.suspended and requests.stalled[slot] == S.IN_FLIGHT:
                what = "suspended"
            else:
                prefills = tokens.get(slot, 0) > 1 or requests.length[slot] - requests.computed[slot] > 1
                what = "prefill" if prefills else "decoding"
            span = self._open.get(request)
            if span is not None:
                span.end = now
            if span is None or span.what != what:
                self._open[request] = Span(request, what, now, now)
                self.spans.append(self._open[request])
        for request in self._open.keys() - seen:
            self._open.pop(request).end = now

    def write(self, path: Path, title: str) -> None:
        """Write the picture in the format of the path's suffix. PNG needs matplotlib. Raises OSError."""
        if path.suffix == ".png":
            self._write_png(path, title)
        elif path.suffix == ".html":
            page = f"<!doctype html><html><head><meta charset='utf-8'><title>{escape(title)}</title></head><body>"
            path.write_text(f"{page}{self._svg(title)}</body></html>\n")
        else:
            path.write_text(self._svg(title) + "\n")

    def _lines(self) -> tuple[dict[int, int], int, int]:
        """The line of each request, and the first and last time."""
        order = sorted({span.request for span in self.spans})[:MOST_REQUESTS]
        first = min((span.begin for span in self.spans), default=0)
        return {r: i for i, r in enumerate(order)}, first, max([first + 1, *(span.end for span in self.spans)])

    def _svg(self, title: str) -> str:
        lines, first, last = self._lines()
        scale, height = WIDTH / (last - first), TOP + ROW * len(lines) + 24
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{LEFT + WIDTH + 20}' height='{height}' font-family='sans-serif' "
            f"font-size='10'><rect width='100%' height='100%' fill='white'/>",
            f"<text x='{LEFT}' y='14' font-size='12'>{escape(title)}</text>",
        ]
        for i, (what, colour) in enumerate(COLOURS.items()):
            left = LEFT + 90 * i
            parts.append(f"<rect x='{left}' y='22' width='{BAR}' height='{BAR}' fill='{colour}'/>")
            parts.append(f"<text x='{left + 14}' y='31'>{what}</text>")
        for request, line in lines.items():
            parts.append(f"<text x='{LEFT - 6}' y='{TOP + ROW * line + BAR - 1}' text-anchor='end'>#{request}</text>")
        for span in self.spans:
            if span.request in lines and span.end > span.begin:
                x, y = LEFT + (span.begin - first) * scale, TOP + ROW * lines[span.request]
                length, begin = (span.end - span.begin) / 1e6, (span.begin - first) / 1e6
                about = f"#{span.request} {span.what}, {length:.3f} ms from {begin:.3f} ms on"
                parts.append(
                    f"<rect x='{x:.2f}' y='{y}' width='{max(0.3, (span.end - span.begin) * scale):.2f}' height='{BAR}' "
                    f"fill='{COLOURS[span.what]}'><title>{about}</title></rect>"
                )
        for i in range(TICKS + 1):
            x, at = LEFT + WIDTH * i / TICKS, (last - first) * i / TICKS / 1e6
            parts.append(f"<text x='{x:.1f}' y='{height - 8}' text-anchor='middle'>{at:.6g} ms</text>")
        return "".join(parts) + "</svg>"

    def _write_png(self, path: Path, title: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        lines, first, _ = self._lines()
        figure, axis = pyplot.subplots(figsize=(12, min(60.0, 1.5 + 0.16 * len(lines))), layout="constrained")
        for what, colour in COLOURS.items():
            chosen = [span for span in self.spans if span.what == what and span.request in lines]
            rows, begins = [lines[span.request] for span in chosen], [(span.begin - first) / 1e6 for span in chosen]
            lengths = [(span.end - span.begin) / 1e6 for span in chosen]
            axis.barh(rows, lengths, left=begins, color=colour, label=what, height=0.8)
        axis.set(xlabel="ms", ylabel="request, in order of arrival", title=title)
        axis.invert_yaxis()
        axis.legend(loc="upper right", ncols=len(COLOURS), fontsize=8)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


HEAD = "arrival_s,prompt_tokens,generated_tokens,max_tokens,priority"


@dataclass(order=True)
class Seen:
    """A recorded request.

    generated: tokens so far. The last token is missing if the slot was reused in the turn in which the request ended.
    """

    arrival: int  # arrival number
    arrived_ns: int
    prompt: int
    max_tokens: int
    priority: int
    generated: int = 0


class RecordedRequests:
    """Collects the accepted requests of a replay: call `take` after each turn. state: the state before the first turn."""

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
        """Write the CSV file, omitting requests without a token. Returns their number. Raises OSError."""
        chosen = sorted(seen for seen in self._seen.values() if seen.generated > 0)
        lines = [HEAD]
        for seen in chosen:
            arrival_s = (seen.arrived_ns - chosen[0].arrived_ns) / 1e9
            lines.append(f"{arrival_s:.6f},{seen.prompt},{seen.generated},{seen.max_tokens},{seen.priority}")
        path.write_text("\n".join(lines) + "\n")
        return len(chosen)


SHOWN = ("--host", "--port", "--served-model-name")  # options that distinguish servers


def _described(name: str) -> str:
    """An engine's name, with model and port from its start command if that process still runs."""
    from blinkpy.recording.recording_layout import LINK_PREFIX

    found = re.match(r"serve-(\d+)-", name)
    try:
        pid = int(found[1]) if found else FOLDER.joinpath(f"{LINK_PREFIX}{name}").readlink().parts[2]
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        at = next(i for i, word in enumerate(words) if word in ("serve", "engine"))
    except (OSError, ValueError, IndexError, StopIteration):
        return name
    model = [word for word in words[at + 1 : at + 2] if word and not word.startswith("-")]
    given = [f"{option} {value}" for option, value in pairwise(words[at:]) if option in SHOWN]
    given += [word.replace("=", " ", 1) for word in words[at:] if word.partition("=")[0] in SHOWN and "=" in word]
    return f"{name} ({' '.join([words[at], *model, *given])})"


def run_record(options: RecordOptions) -> int:
    """Dump the recording of a running engine. Returns the exit code. Raises ConfigError if no engine records."""
    from blinkpy.recording.recording_layout import LINK_PREFIX
    from blinkpy.recording.recording_reader import RecordingReader, write_dump
    from blinkpy.verify.replay.replayer import parse_turns

    name = options.name
    if not name:
        names = [path.name.removeprefix(LINK_PREFIX) for path in FOLDER.glob(f"{LINK_PREFIX}*") if path.exists()]
        if len(names) != 1:
            raise ConfigError(
                f"several engines are recording; give the name of one: {'; '.join(map(_described, sorted(names)))}"
                if names
                else "no engine on this machine is recording: start one with record_steps above 0"
            )
        name = names[0]
    capture = RecordingReader(name).capture()
    limits = capture.description["limits"]
    turns = sum(1 for _ in parse_turns(capture.words, int(limits["pairs"]), int(limits["step_drafts"])))
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
    from blinkpy.recording.recording_reader import read_dump
    from blinkpy.scheduler.policy_vetting import recorded_policy
    from blinkpy.sources import SCHEDULER, source_digest
    from blinkpy.verify.replay.replay_command import SUFFIXES, RecordedRequests, Timeline, narrate
    from blinkpy.verify.replay.replayer import Replay

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
