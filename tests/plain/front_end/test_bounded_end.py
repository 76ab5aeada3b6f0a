"""A front end that is asked to end does so, whatever keeps a thread of it: each process has a bound."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import ROOT, Command
from support.served import programs_below
from support.waiting import wait_for

from benchmarks.serving.systems import alive, command_line, tree

LONG_S = 60.0  # far beyond any bound
BEFORE_TRACES_S = 8.0  # less than the limit of a front end's shutdown, and than the time until it logs its stacks
SERVES = re.compile("blinkpy serves")
PIPE_BYTES = 4096
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}  # so that a file that somebody writes to is locked
STUCK = {
    "a lock": "threading.Lock().acquire() and lock.acquire()",
    "a thread": "thread.start(); thread.join()",
    "the interpreter's end": "thread.start()",
    "an exit function": "atexit.register(time.sleep, 1000)",
    "signals again and again": "signal.signal(signal.SIGTERM, lambda *_: time.sleep(1000)); signal.raise_signal(signal.SIGTERM)",
}


def script(stuck: str) -> str:
    return (
        "import atexit, signal, threading, time\n"
        "from blinkpy.process_exit import end_within\n"
        "thread, lock = threading.Thread(target=time.sleep, args=(1000,)), threading.Lock()\n"
        f"lock.acquire()\nend_within(1.0)\nend_within(1000.0)\n{stuck}\n"
    )


def test_a_process_past_its_deadline_exits_with_its_stack() -> None:
    """All side by side, as each takes its time."""
    pipes = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = {name: subprocess.Popen([sys.executable, "-c", script(stuck)], **pipes) for name, stuck in STUCK.items()}
    try:
        for name, process in running.items():
            _, said = process.communicate(timeout=LONG_S)
            assert process.returncode == -signal.SIGALRM, name
            assert "most recent call first" in said, name
    finally:
        for process in running.values():
            process.kill()


def test_a_process_exits_with_unread_output() -> None:
    """By the bound while it writes, and in order before it flushes."""
    reader, writer = os.pipe()
    fill(writer)
    leaves = "from blinkpy.process_exit import exit_process; import sys; sys.stdout.write('x'); exit_process(3)"
    says = "from blinkpy.process_exit import exit_process, print_error; exit_process(2 + print_error('x'))"
    twice = (
        "import os, signal\nfrom blinkpy.process_exit import Signals, exit_process\n"
        "with Signals().caught() as signals:\n    [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]\n"
        "exit_process(1 + signals.count)"
    )
    logs = (
        "import logging\nfrom blinkpy.dpu.watch.log_output import end_process, start_logging\n"
        "start_logging('x', 'info', 'text')\n"
        "end_process(lambda: len([logging.getLogger('blinkpy').error('x' * 100) for _ in range(10000)]) and {})"
    )
    ends = [(leaves, 3), (says, 3), (twice, 3), (logs.format(3), 3), (logs.format("1 / 0"), 1)]
    try:
        for code, expected in ((script("import sys; sys.stderr.write('x')"), -signal.SIGALRM), *ends):
            both = {"stdout": writer, "stderr": writer}
            assert (
                subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=LONG_S, env=BUFFERED, **both).returncode
                == expected
            )
    finally:
        os.close(reader)
        os.close(writer)


def fill(writer: int) -> None:
    """A pipe that takes nothing more."""
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        os.set_blocking(writer, True)


def workers(front_end: int) -> set[int]:
    """The worker processes of a front end; they have processes for large bodies and grammars below them."""
    return {pid for pid in programs_below(front_end) if " blinkpy.dpu.worker " in f"{command_line(pid)} "}


def test_a_front_end_exits_with_an_unread_log() -> None:
    """Its supervisor has something to say: a worker was killed."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "blinkpy", "frontend", "demo", "--engine", "none-1", "--engine", "none-2", "--port", "0"]
    with subprocess.Popen(
        [*command, "--shutdown-s", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=BUFFERED,
        stderr=writer,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert SERVES.search(process.stdout.readline() + process.stdout.readline())
            fill(writer)
            (worker,) = workers(process.pid)
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: workers(process.pid) - {worker}, LONG_S)  # another
            process.terminate()
            try:
                assert process.wait(BEFORE_TRACES_S) == 0
            except subprocess.TimeoutExpired:
                pytest.fail(f"it has not ended; its stacks:\n{said_from_now_on(reader, process)}")
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_a_server_watches_its_engine_and_exits_with_an_unread_log() -> None:
    """All of its processes have something to say."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "blinkpy", "serve", "demo", "--device", "null", "--port", "0", "--shutdown-s", "0"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "env": BUFFERED, "stderr": writer, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        try:
            assert process.stdout is not None
            assert SERVES.search(process.stdout.readline() + process.stdout.readline())
            fill(writer)

            def engines() -> set[int]:
                return {child for child in tree(process.pid)[1:] if " engine " in command_line(child)}

            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda: engines() - {engine} != set(), LONG_S)  # another
            process.terminate()
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(LONG_S) == 0
            except subprocess.TimeoutExpired:
                pytest.fail(f"it has not ended; its stacks:\n{said_from_now_on(reader, process)}")
        finally:
            for child in tree(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.close(reader)
            os.close(writer)


def said_from_now_on(reader: int, process: subprocess.Popen[str]) -> str:
    """Writes to a full pipe, until a process ends."""
    os.set_blocking(reader, False)
    said = b""
    while process.poll() is None:
        with contextlib.suppress(BlockingIOError):
            said += os.read(reader, PIPE_BYTES)
        time.sleep(0.01)
    return said.decode(errors="replace").lstrip("x")


@pytest.fixture
def stuck_links(tmp_path: Path) -> dict[str, str]:
    """An environment in which a look for an engine never ends."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'blinkpy.dpu.worker' in sys.orig_argv:\n"
        "    import time\n"
        "    from pathlib import Path\n"
        "    from blinkpy.dpu.link import connectors\n"
        "    def stuck(*given):\n"
        "        Path('/proc/thread-self/comm').write_text('stuck')\n"
        "        time.sleep(1000)\n"
        "    connectors.open_queue_pair = stuck\n"
    )
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


@pytest.mark.parametrize("orphaned", [False, True], ids=["asked", "without its supervisor"])
def test_a_worker_ends_while_it_looks_for_engines(orphaned: bool, stuck_links: dict[str, str]) -> None:
    engines = ("--engine", "none-1", "--engine", "none-2")
    front = Command("frontend", "demo", *engines, "--port", "0", "--shutdown-s", "0", env=stuck_links)
    try:
        front.find(SERVES)
        (worker,) = workers(front.process.pid)
        assert "stuck" in {path.read_text().strip() for path in Path(f"/proc/{worker}/task").glob("*/comm")}
        if orphaned:
            os.kill(front.process.pid, signal.SIGKILL)
        else:
            assert front.end(LONG_S) == 0
        wait_for(lambda: not alive(worker), LONG_S)
        assert not any("did not exit in time" in line for line in front.said)
    finally:
        front.kill()
