"""The display of a start-up, on a terminal and in a log file."""

import io

import pytest

from blinkpy.progress import OutputCount, Progress, bar


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
    shown = [line.split("\x1b[K")[-1] for line in text.split("\n")]  # what is left of each line in the end
    assert shown == ["  load weights  1.5 s", "  compile  2.2 s", "ready", ""]


def test_outputs_are_counted_on_a_terminal_unless_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
