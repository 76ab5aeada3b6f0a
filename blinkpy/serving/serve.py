"""`blinkpy serve`: an engine and front ends as processes, watched by this one.

Order of a start: find the model, start the engine, wait until it is ready, start the front ends, say the address. Order of an
end: front ends stop accepting and finish what they have (--shutdown-s), then the engine stops, then the segment is gone.

Whatever dies, nothing hinders the next start: children end when this process does (see blinkpy.processes), a segment
without a living engine is removed (see blinkpy.transport.segment), and segments of `serve` have names of their own.
"""

import contextlib
import sys
import time
from collections.abc import Callable

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.link.connectors import ENDS
from blinkpy.models.weights.model_folder import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Signals, Stopped, describe_exit, print_error
from blinkpy.processes import Child, ChildError
from blinkpy.progress import Progress
from blinkpy.serving.addresses import check_access, print_ready
from blinkpy.serving.engine_process import ENGINE_STOP_S, START_SILENCE_S
from blinkpy.serving.frontend_process import FRONTEND_HURRY_S, FRONTEND_START_S, PACKAGES
from blinkpy.serving.segment_names import private_name, remove_leftovers
from blinkpy.transport.segment import unlink_stale
from blinkpy.transport.transport_kinds import chosen_end
from blinkpy.verify.recording.dump_file import save_crash
from blinkpy.verify.recording.recording_links import RecordingError, remove_dead_links
from blinkpy.verify.recording.recording_reader import RecordingReader

FAULT_GRACE_S = 5.0  # how long front ends go on answering errors after the engine died
POLL_S = 0.1


def serve(config: Config, given: frozenset[str]) -> int:
    """Serve until a signal or a failure; returns the exit code. given: names of the options that somebody set."""
    if chosen_end(ENDS, config).crosses_machines:
        way = f"--transport {config.transport.transport}"
        raise ConfigError(f"serve runs everything on one machine: for {way} start `blinkpy engine` and `blinkpy frontend`")
    require_packages("a front end", *PACKAGES)
    if "name" not in given:
        config = config.with_options({"name": private_name()})
    remove_leftovers()
    progress = Progress()
    told, hang_ups = list[Child](), list[None]()  # who hears of SIGHUP: the front end, once it is ready

    def hang_up() -> None:
        hang_ups.append(None)
        for child in told:
            child.hang_up()

    with Signals(on_hang_up=hang_up).caught() as signals, contextlib.ExitStack() as stack:

        def tick() -> None:
            signals.check()
            progress.tick()

        try:
            check_access(config)
            config = find_model(config, progress)
            stack.callback(unlink_stale, config.engine.name)  # in case the engine was killed
            stack.callback(remove_dead_links)
            engine = start(stack, "engine", config, signals, ENGINE_STOP_S)
            engine.wait_ready(START_SILENCE_S, progress, tick)
            progress("starting front ends")
            frontend = start(stack, "frontend", config, signals, config.frontend.shutdown_s + ENGINE_STOP_S, FRONTEND_HURRY_S)
            facts = frontend.wait_ready(FRONTEND_START_S, on_tick=tick)
            told.append(frontend)
            if hang_ups:  # it may have read its files before
                frontend.hang_up()
            print_ready(config, int(facts["port"]), progress.close())
            return watch(engine, frontend, signals, crash_saver(config))
        except Stopped:
            progress.close()
            return 0
        except ChildError as error:
            progress.close()
            if error.usage:
                raise ConfigError(str(error)) from error
            return print_error(str(error))


def start(
    stack: contextlib.ExitStack, entry: str, config: Config, signals: Signals, grace_s: float, hurry_s: float = 0.0
) -> Child:
    """Start a child that is ended, at the latest, when the stack is unwound.

    grace_s: time for ending in order; hurry_s: what is left of it after a second signal.
    """
    child = Child(entry, config)
    stack.callback(child.end, grace_s, lambda: signals.count > 1, hurry_s)
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
            saved = save_crash(reader, config.engine.record_folder, name, reason)
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
            code = print_error(f"the engine {how}; clients get errors for {FAULT_GRACE_S:.0f} s")
            deadline = time.monotonic() + FAULT_GRACE_S
            while time.monotonic() < deadline and not signals.count and frontend.exit_code() is None:
                time.sleep(POLL_S)
            return code
        if frontend.exit_code() is not None:
            return print_error(f"the front end {describe_exit(frontend.exit_code() or 0)}")
    return 0
