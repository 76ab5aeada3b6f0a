"""`blinkpy serve`: an engine and front ends as processes, watched by this one; and each half alone.

Order of a start: find the model, start the engine, wait until it is ready, start the front ends, say the address. Order of an
end: front ends stop accepting and finish what they have (--shutdown-s), then the engine stops, then the segment is gone.

Whatever dies, nothing hinders the next start: children end when this process does (see blinkpy.processes), a segment
without a living engine is removed (see blinkpy.dpu.shm), and segments of `serve` have names of their own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from blinkpy.config import Config, ConfigError, split_address
from blinkpy.dpu.shm import FOLDER, unlink_stale
from blinkpy.dpu.transport import TransportError
from blinkpy.kernels.cuda_calls import CudaError
from blinkpy.processes import Child, ChildError, Entry, Reporter, child_main, describe_exit
from blinkpy.progress import Progress, Report
from blinkpy.recording.crash import crash_folder, save_crash
from blinkpy.recording.errors import RecordingError
from blinkpy.recording.links import remove_dead_links
from blinkpy.recording.reader import RecordingReader

if TYPE_CHECKING:
    from blinkpy.rdma_listener import RdmaListener

START_SILENCE_S = 600.0  # longest silence of an engine that starts; it reports every phase and every shard of weights
FRONTEND_START_S = 60.0
FAULT_GRACE_S = 5.0  # how long front ends go on answering errors after the engine died
ENGINE_STOP_S = 10.0
POLL_S = 0.1
OPENMP_SPINS = 2000
SERVE_PREFIX = "serve-"  # of the names of segments that nobody chose


class Stopped(Exception):
    """The user asked for the end."""


class Signals:
    """SIGINT and SIGTERM as a count: one asks for an orderly end, two for an immediate one."""

    def __init__(self) -> None:
        self.count = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def check(self) -> None:
        """Raise Stopped once a signal has come."""
        if self.count:
            raise Stopped

    @contextlib.contextmanager
    def caught(self) -> Iterator[Signals]:
        """Count signals within the block."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(config: Config, named: bool) -> int:
    """Serve until a signal or a failure; returns the exit code. named: the user chose the segment's name."""
    if config.transport.transport != "shm":
        raise ConfigError(
            "serve runs everything on one machine: for RDMA start `blinkpy engine` and `blinkpy frontend`"
        )
    if not named:
        config = config.with_options({"name": f"{SERVE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"})
    remove_leftovers()
    progress = Progress()
    with Signals().caught() as signals, contextlib.ExitStack() as stack:

        def tick() -> None:
            signals.check()
            progress.tick()

        try:
            check_address(config.frontend.host, config.frontend.port)
            config = find_model(config, progress)
            stack.callback(unlink_stale, config.engine.name)  # in case the engine was killed
            stack.callback(remove_dead_links)
            engine = start(stack, "engine", config, signals, ENGINE_STOP_S)
            engine.wait_ready(START_SILENCE_S, progress, tick)
            progress("starting front ends")
            frontend = start(stack, "frontend", config, signals, config.frontend.shutdown_s + ENGINE_STOP_S)
            facts = frontend.wait_ready(FRONTEND_START_S, None, tick)
            print(welcome(config, int(facts["port"]), progress.close()), flush=True)
            return watch(engine, frontend, signals, crash_saver(config))
        except Stopped:
            progress.close()
            return 0
        except ChildError as error:
            progress.close()
            if error.usage:
                raise ConfigError(str(error)) from error
            return complain(str(error))


def engine_alone(config: Config, given: frozenset[str]) -> int:
    """`blinkpy engine`: an engine in this process; front ends attach to its segment by name, or over RDMA.

    given: names of the options that somebody set.
    """
    check_transport(config, given, "listen")
    progress = Progress()

    def ready(address: str) -> None:
        name = shlex.quote(config.model.served_model_name)
        how = f"--transport rdma --engine {address}" if address else f"--name {config.engine.name}"
        progress.say(f"blinkpy: engine {config.engine.name} is ready after {progress.close():.1f} s; attach front ends with\n")
        print(f"blinkpy frontend {name} {how}", flush=True)

    config = find_model(config, progress, tokenizer=False)
    try:
        return run_engine(config, progress, ready)
    except CudaError as error:
        progress.close()
        leave(complain(f"the GPU failed: {error}"))


def check_transport(config: Config, given: frozenset[str], address: str) -> None:
    """Raise ConfigError when options of the transport don't fit each other. address: name of the option with HOST:PORT."""
    if config.transport.transport == "shm":
        for name in ("listen", "engine", "rdma_device", "rdma_gid_index"):
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')} needs --transport rdma")
        return
    text = getattr(config.transport, address)
    if not text:
        raise ConfigError(f"--transport rdma needs --{address} HOST:PORT")
    split_address(text, address)
    if address == "engine" and "name" in given:
        raise ConfigError("--name is for front ends on the engine's machine; --transport rdma finds the engine by --engine")


def frontend_alone(config: Config, given: frozenset[str]) -> int:
    """`blinkpy frontend`: front ends that attach to an engine, and wait for it if need be.

    given: names of the options that somebody set.
    """
    check_transport(config, given, "engine")
    check_address(config.frontend.host, config.frontend.port)
    config = find_model(config, Progress(), weights=False)
    return run_front(config, lambda host, port: print(welcome(config, port), flush=True))


def engine_child(config: Config, reporter: Reporter) -> int:
    """The engine as a child of `serve` or `LLM`."""
    try:
        return run_engine(config, reporter, lambda address: reporter.ready())
    except CudaError as error:
        reporter.error(f"the GPU failed: {error}")  # one line from the parent, and no traceback
        leave(1)


def frontend_child(config: Config, reporter: Reporter) -> int:
    """The front ends as a child of `serve`."""
    return run_front(config, lambda host, port: reporter.ready(host=host, port=port))


CHILD_ENTRIES: dict[str, Entry] = {"engine": engine_child, "frontend": frontend_child}


def run_front(config: Config, on_ready: Callable[[str, int], None]) -> int:
    """Run front ends until a signal; the model must be a folder already."""
    from blinkpy.dpu.supervisor import run_frontend

    logging.basicConfig(level=config.frontend.log_level.upper(), format="%(asctime)s frontend %(levelname)s %(message)s")
    return run_frontend(config, Path(config.model.model), on_ready)


def run_engine(config: Config, report: Report, on_ready: Callable[[str], None]) -> int:
    """Run an engine in this process until a signal. The first one drains for --shutdown-s at most, the second one stops.

    on_ready gets HOST:PORT for front ends on other machines, or "". Raises ConfigError for what the user can mend, an engine
    that isn't installed included, and CudaError when the GPU fails.
    """
    spare_cores()
    try:
        from blinkpy.devices import make_engine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "blinkpy":
            raise
        raise ConfigError(f"an engine needs {error.name}: pip install 'blinkpy-serve[cpu]'") from error
    engine = make_engine(config, report)
    listener = open_listener(config)
    running, asked = False, 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if not running:
            raise Stopped
        engine.stop(drain=asked == 1)
        if asked == 1:
            timer.start()

    timer = threading.Timer(config.frontend.shutdown_s, engine.stop)
    timer.daemon = True
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        engine.start()
        address = ""
        if listener is not None:
            listener.start(engine.segment)
            host, port = listener.address
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        running = True
        on_ready(address)
        engine.run()
    except Stopped:
        pass
    except TransportError as error:
        raise ConfigError(str(error)) from error
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join(1)  # a thread that the interpreter's end meets half way takes the process down with it
        if listener is not None:
            listener.close()
        engine.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def open_listener(config: Config) -> RdmaListener | None:
    """The door for front ends on other machines, if there is to be one; before minutes go into loading a model."""
    if config.transport.transport == "shm":
        return None
    from blinkpy.rdma_listener import RdmaListener

    host, port = split_address(config.transport.listen, "listen")
    try:
        return RdmaListener(host, port, config.transport.rdma_device, config.transport.rdma_gid_index)
    except TransportError as error:
        raise ConfigError(str(error)) from error


def start(stack: contextlib.ExitStack, entry: str, config: Config, signals: Signals, grace_s: float) -> Child:
    """Start a child that is ended, at the latest, when the stack is unwound.

    grace_s: time for ending in order; a second signal ends it at once.
    """
    child = Child(entry, config)
    stack.callback(child.end, grace_s, lambda: signals.count > 1)
    return child


def crash_saver(config: Config) -> Callable[[str], None]:
    """A function that saves the recording of an engine that was killed, with a reason: it holds the memory from now on."""
    name = config.engine.name
    try:
        reader = RecordingReader(name) if config.engine.record_steps else None
    except RecordingError:
        reader = None

    def save(reason: str) -> None:
        if reader is not None:
            saved = save_crash(reader, crash_folder(config.engine.record_folder), name, reason)
            print(f"blinkpy: {saved}", file=sys.stderr, flush=True)

    return save


def watch(engine: Child, frontend: Child, signals: Signals, save: Callable[[str], None]) -> int:
    """Wait for a signal or for the death of a part; returns the exit code. save: for the recording of an engine that was killed;
    one that fails saves it itself."""
    while not signals.count:
        time.sleep(POLL_S)
        if engine.exit_code() is not None:
            ended, reason = engine.exit_code() or 0, engine.last_error()
            if ended < 0:
                save(f"the engine {describe_exit(ended)}")
            how = describe_exit(ended) + (f" ({reason})" if reason else "")
            code = complain(f"the engine {how}; clients get errors for {FAULT_GRACE_S:.0f} s")
            deadline = time.monotonic() + FAULT_GRACE_S
            while time.monotonic() < deadline and not signals.count and frontend.exit_code() is None:
                time.sleep(POLL_S)
            return code
        if frontend.exit_code() is not None:
            return complain(f"the front end {describe_exit(frontend.exit_code() or 0)}")
    return 0


def complain(message: str) -> int:
    """Say a failure in one line; the exit code for it."""
    print(f"blinkpy: error: {message}", file=sys.stderr, flush=True)
    return 1


def spare_cores() -> None:
    """Let OpenMP's threads sleep soon after a parallel region, unless the user chose otherwise. Before torch is imported.

    By default GNU's spin 300,000 times, and on cores that others use too they spin for one that the kernel has put aside: with
    this count a token took a fifth of the time on two busy cores, and the same time on two quiet ones.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter and its libraries down first, when all that matters is closed.

    After a fault of the GPU destructors of torch fail and abort the process; and at any time a thread that wakes up while
    the interpreter ends, such as the one that watches the parent, can do so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def find_model(config: Config, progress: Report, weights: bool = True, tokenizer: bool = True) -> Config:
    """The config with the model's folder in place of its name, downloaded if need be; the API keeps the name."""
    from blinkpy.models.hub import resolve_model

    progress(f"finding model {config.model.model}")
    weights = weights and config.engine.device != "null" and config.model.load_format != "dummy"
    folder = resolve_model(config.model.model, weights=weights, tokenizer=tokenizer)
    name = config.model.served_model_name or config.model.model
    return config.with_options({"model": str(folder), "served_model_name": name})


def check_address(host: str, port: int) -> None:
    """Notice an address that can't be used before minutes go into loading a model. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}") from error


def remove_leftovers() -> None:
    """Remove segments of earlier `serve` and `LLM` whose engines were killed together with whatever watched them."""
    for path in FOLDER.glob(f"blinkpy.{SERVE_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            unlink_stale(path.name.removeprefix("blinkpy."))
    remove_dead_links()


def base_url(host: str, port: int) -> str:
    """Where to reach a server that listens on a host, from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def welcome(config: Config, port: int, seconds: float | None = None) -> str:
    """The lines that a person sees when the server is ready, with a request to paste."""
    name, url = config.model.served_model_name, base_url(config.frontend.host, port)
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64, "stream": True}
    )
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.frontend.api_key else ""
    after = "" if seconds is None else f"ready after {seconds:.1f} s; "
    return (
        f"blinkpy serves {name} on {url} ({after}Ctrl-C ends it). Try:\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n"
    )


if __name__ == "__main__":
    leave(child_main(CHILD_ENTRIES, sys.argv[1:]))
