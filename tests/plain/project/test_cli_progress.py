"""The display of a start-up, on a terminal and in a log file."""

import io

from blinkpy.progress import Progress, bar


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


def test_a_share_stays_within_the_bar() -> None:
    assert bar(5, 4) == bar(4, 4) == "[" + "#" * 20 + "] 100%"
    assert bar(-1, 4) == "[" + "." * 20 + "]   0%"
