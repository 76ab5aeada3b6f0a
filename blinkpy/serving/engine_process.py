"""Runs an engine in this process, for `blinkpy engine` or as a child of `serve` or `LLM`."""

import contextlib
import os
import secrets
import shlex
import threading
from collections.abc import Callable

from blinkpy.config import Config, ConfigError
from blinkpy.device.cuda import CudaError
from blinkpy.dpu.watch.log_output import end_logging, end_process, start_logging
from blinkpy.engine.link.listeners import ENDS, open_listener
from blinkpy.models.weights.model_folder import find_model
from blinkpy.process_exit import Signals, Stopped, end_within, exit_process, print_error
from blinkpy.processes import Reporter, collect_as_usual
from blinkpy.progress import Progress, ProgressCallback
from blinkpy.recording.recording_layout import remove_dead_links
from blinkpy.transport.contract import TransportError, check_end
from blinkpy.transport.segment import FOLDER, unlink_stale

START_SILENCE_S = 600.0  # time limit between two progress reports of a start: one per phase and per shard of weights
ENGINE_STOP_S = 10.0  # time limit for an orderly end
LONGEST_END_S = 30.0  # beyond --shutdown-s; then the kernel kills the engine
OPENMP_SPINS = 2000
ENGINE = "engine"  # name in the log


def engine_alone(config: Config, given: frozenset[str]) -> int:
    """Run `blinkpy engine`: an engine in this process. Front ends attach to its segment by name, or over
    RDMA.

    given: names of the options that the user set.
    """
    check_end(ENDS, config, given)
    start_logging(ENGINE, config.frontend.log_level, config.watch.log_format)
    progress = Progress()

    def ready(flags: str) -> None:
        name = shlex.quote(config.model.served_model_name)
        progress.say(f"blinkpy: engine {config.engine.name} is ready after {progress.close():.1f} s; attach front ends with\n")
        print(f"blinkpy frontend {name} {flags}", flush=True)

    config = find_model(config, progress, tokenizer=False)

    def run() -> int:
        try:
            return run_engine(config, progress, ready)
        except CudaError as error:
            progress.close()
            end_logging()
            exit_process(print_error(f"the GPU failed: {error}"))

    end_process(run)


def engine_child(config: Config, reporter: Reporter) -> int:
    """Run the engine as a child of `serve` or `LLM`."""
    start_logging(ENGINE, config.frontend.log_level, config.watch.log_format)
    try:
        return run_engine(config, reporter, lambda flags: reporter.ready(flags=flags))
    except CudaError as error:
        reporter.error(f"the GPU failed: {error}")  # the parent prints one line, without a traceback
        end_logging()
        exit_process(1)


def run_engine(config: Config, report: ProgressCallback, on_ready: Callable[[str], None]) -> int:
    """Run an engine in this process until a signal. The first signal drains for at most --shutdown-s, the
    second one stops.

    on_ready: called with the flags by which front ends reach this engine.
    Raises ConfigError for errors that the user can correct, including missing packages, and CudaError if the
    GPU fails.
    """
    spare_cores()
    try:
        from blinkpy.engine.engine import make_engine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "blinkpy":
            raise
        raise ConfigError(f"an engine needs {error.name}: pip install 'blinkpy-serve[cpu]'") from error
    engine = make_engine(config, report)
    listener = open_listener(config)
    running = False

    def react(count: int) -> None:
        if running:
            engine.stop(drain=count == 1)
        if count == 1:
            end_within(config.frontend.shutdown_s + LONGEST_END_S)
            if not running:
                raise Stopped
            timer.start()

    timer = threading.Timer(config.frontend.shutdown_s, engine.stop)
    timer.daemon = True
    with Signals(react).caught():
        try:
            engine.start()
            listener.start(engine.segment, engine.pair_memory)
            collect_as_usual()
            running = True
            on_ready(listener.flags)
            engine.run()
        except Stopped:
            pass
        except TransportError as error:
            raise ConfigError(str(error)) from error
        finally:
            timer.cancel()
            if timer.is_alive():
                timer.join(1)  # a thread still running at interpreter shutdown would crash the process
            listener.close()
            engine.close()
    return 0


def spare_cores() -> None:
    """Let OpenMP's threads sleep soon after a parallel region, unless the user configured this. Call it before torch is imported.

    By default, GNU's threads spin 300,000 times, even if the thread they wait for has no core. With OPENMP_SPINS, a token took a
    fifth of the time on two busy cores, and no longer on two idle cores.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)


# Generated names for the queue segments of `serve` and `LLM`.

SERVE_PREFIX = "serve-"  # prefix of generated segment names


def private_name() -> str:
    """A new unique segment name for this process."""
    return f"{SERVE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers() -> None:
    """Remove the segments of earlier `serve` and `LLM` processes that were killed together with their engines."""
    for path in FOLDER.glob(f"blinkpy.{SERVE_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            unlink_stale(path.name.removeprefix("blinkpy."))
    remove_dead_links()
