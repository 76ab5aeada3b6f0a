"""A picture of a recording as SVG or HTML: one line per request, coloured by its state."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.verify.replay.replay_options import ReplayOptions
from blinkpy.verify.replay.replayer import Replay, Turn
from blinkpy.verify.replay.request_events import EventTracer

MOST_DIFFERENCES = 10  # maximum turns shown with their differences; others are counted


def narrate(replay: Replay, options: ReplayOptions) -> Iterator[tuple[Turn, bool]]:
    """Run a replay and print the details that the options select. Yields each turn, and whether it decided
    differently from the recording.
    """
    tracer, different, begin_ns = EventTracer(replay.limits, replay.state), 0, replay.turns[0].now_ns if replay.turns else 0
    for turn, differences in replay.run():
        for event in () if replay.failed else tracer.events_of(turn):
            if options.trace and options.step in (-1, turn.number) and options.request in (-1, event.request):
                at_ms, who = (turn.now_ns - begin_ns) / 1e6, f"#{event.request}" if event.request >= 0 else ""
                print(f"{at_ms:12.3f} ms  turn {turn.number:<8} {who:>8}  {event.kind:<9} {event.text}")
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
