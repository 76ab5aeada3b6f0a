"""The display of a start-up, on a terminal and in a log file."""

import io
import logging
from collections.abc import Iterator

import pytest

from blinkpy.progress import LINE_S, OutputCount, Progress, bar


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO) -> tuple[str, float]:
    now = [100.0]
    progress = Progress(stream, lambda: now[0])
    progress("load weights", 0, 8)
    now[0] += 1.5
    progress("load weights", 4, 8)
    progress("compile")
    now[0] += 2.25
    progress.say("ready")
    return stream.getvalue(), progress.close()


def test_a_log_file_gets_one_line_per_phase_and_no_control_characters() -> None:
    text, seconds = run(io.StringIO())
    assert text == "blinkpy: load weights ...\nblinkpy: compile ...\nready\n"
    assert seconds == 3.75


def test_a_terminal_gets_one_line_that_moves_and_stays_when_a_phase_is_over() -> None:
    text, _ = run(Screen())
    assert "[##########..........]  50%" in text
    shown = [line.split("\x1b[K")[-1] for line in text.split("\n")]  # the rest of each line at the end
    assert shown == ["  load weights  1.5 s", "  compile  2.2 s", "ready", ""]


LOGGER = logging.getLogger("blinkpy.progress_test")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """The text that a handler of LOGGER gets at level INFO."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    yield stream
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.propagate = True


def long_start(stream: io.StringIO, begins: bool = True, logger: logging.Logger | None = LOGGER) -> str:
    """A phase with ticks each second for 25 s, and a short phase."""
    now = [100.0]
    progress = Progress(stream, lambda: now[0], logger, begins)
    progress("load weights", 0, 8)
    for second in range(25):
        now[0] += 1
        if second % 2:
            progress("load weights", second / 4, 8)
        else:
            progress.tick()
    progress("compile")
    progress.close()
    return stream.getvalue()


LINES = ["load weights ...", "load weights ... 28%, 10 s", "load weights ... 59%, 20 s", "compile ..."]


def test_a_long_phase_has_a_line_each_10_seconds_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LINE_S == 10
    monkeypatch.setattr(LOGGER, "propagate", False)  # another test may have left a level or a handler
    for logger in (None, LOGGER):  # no handler takes the logger's records
        assert long_start(io.StringIO(), True, logger) == "".join(f"blinkpy: {line}\n" for line in LINES)
        assert long_start(io.StringIO(), False, logger) == "".join(f"blinkpy: {line}\n" for line in LINES[1:3])


def test_a_logger_gets_the_lines_once_somebody_listens(logged: io.StringIO) -> None:
    assert long_start(io.StringIO()) == ""
    assert logged.getvalue().splitlines() == LINES
    shown = long_start(Screen())
    assert "blinkpy:" not in shown
    assert "load weights  25.0 s" in shown
    assert logged.getvalue().splitlines() == [*LINES, LINES[0], LINES[3]]


def test_a_batch_without_a_terminal_has_lines_only_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "blinkpy: generating ... 25%, 11 s\n"
    for shown, text, more in ((None, "", later), (False, "", ""), (True, "blinkpy: generating ...\n", later)):
        stream, now = io.StringIO(), [0.0]
        monkeypatch.setattr("sys.stderr", stream)
        count = OutputCount(shown, 4, None, lambda now=now: now[0])  # type: ignore[misc]
        count.advance()
        count.show()
        assert stream.getvalue() == text
        now[0] += 11
        count.show()
        count.close()
        assert stream.getvalue() == text + more


def test_outputs_are_counted_on_a_terminal_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown, total, seen in ((None, 4, True), (True, 4, True), (False, 4, False), (None, 0, False)):
        screen = Screen()
        monkeypatch.setattr("sys.stderr", screen)
        count = OutputCount(shown, total)
        for _ in range(total // 2):
            count.advance()
        count.show()
        assert ("generating  [##########..........]  50%" in screen.getvalue()) == seen
        count.close()
        assert screen.getvalue().endswith("  generating  0.0 s\n") == seen
        assert bool(screen.getvalue()) == seen


def test_a_share_stays_within_the_bar() -> None:
    assert bar(5, 4) == bar(4, 4) == "[" + "#" * 20 + "] 100%"
    assert bar(-1, 4) == "[" + "." * 20 + "]   0%"
