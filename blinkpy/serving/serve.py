"""`blinkpy serve`: an engine and front ends as processes, watched by this process.

Order of a start: find the model, start engine and front ends concurrently, wait until both are ready, print the
address. Until the engine is ready, the front ends answer 503.

Order of an end: front ends stop accepting and finish their requests (--shutdown-s), then the engine stops, then the
segment is removed. An engine that dies earlier is restarted (blinkpy.serving.kept_engine). If a failure ends the server, its last
log line states the reason.

A killed process never blocks the next start: children end with this process (blinkpy.processes), a segment without a
living engine is removed (blinkpy.transport.segment), and segments of `serve` have unique names.
"""

import contextlib
import logging
import os
import time
from functools import partial

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import STARTS_BYTES
from blinkpy.dpu.fleet.fleet_options import check_placement
from blinkpy.dpu.link.connectors import ENDS
from blinkpy.dpu.watch.log_output import end_process, start_logging
from blinkpy.models.weights.model_folder import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Signals, Stopped, describe_exit, end_within, print_error
from blinkpy.processes import REPORT_S, Child, ChildError, Tick
from blinkpy.progress import Progress
from blinkpy.serving.engine_process import ENGINE_STOP_S, private_name, remove_leftovers
from blinkpy.serving.frontend_process import FRONTEND_HURRY_S, FRONTEND_START_S, PACKAGES, check_access, print_ready
from blinkpy.serving.kept_engine import EngineGroup
from blinkpy.transport.contract import chosen_end

logger = logging.getLogger("blinkpy.serve")

LONGEST_END_S = 2 * ENGINE_STOP_S + 20.0  # beyond --shutdown-s; then the kernel kills this process
FAULT_GRACE_S = 5.0  # how long front ends answer with errors after the engine's death


def serve(config: Config, given: frozenset[str]) -> int:
    """Serve until a signal or a failure, then end this process. given: names of options that the user set.
    Raises ConfigError.
    """
    if chosen_end(ENDS, config).crosses_machines:
        transport = f"--transport {config.transport.transport}"
        raise ConfigError(f"serve runs on one machine only; for {transport}, start `blinkpy engine` and `blinkpy frontend`")
    if "engine" in given:
        raise ConfigError("serve starts its own engines: leave out engine, or use `blinkpy frontend`")
    check_placement(config, config.engine.data_parallel_size)
    require_packages("a front end", *PACKAGES)
    start_logging("serve", config.frontend.log_level, config.watch.log_format)
    if "name" not in given:
        config = config.with_options({"name": private_name()})
    remove_leftovers()
    end_process(partial(_run, config))


def _run(config: Config) -> int:
    """Serve until a signal or a failure. Returns the exit code."""
    progress = Progress()
    ready, hang_ups = list[Child](), list[None]()  # ready front ends, which receive SIGHUP

    def hang_up() -> None:
        hang_ups.append(None)
        for child in ready:
            child.hang_up()

    def bound(count: int) -> None:
        end_within(config.frontend.shutdown_s + LONGEST_END_S)

    with Signals(bound, on_hang_up=hang_up).caught() as signals, contextlib.ExitStack() as stack:

        def tick() -> None:
            signals.check()
            progress.tick()

        try:
            check_access(config)
            config = find_model(config, progress)
            starts_fd = os.memfd_create("blinkpy-engine-starts")
            stack.callback(os.close, starts_fd)
            os.ftruncate(starts_fd, config.engine.data_parallel_size * STARTS_BYTES)
            engines = EngineGroup(config, starts_fd, lambda: signals.count > 1)
            config = engines.front_config
            stack.callback(engines.end)
            engines.start()
            frontend = Child("frontend", config, orders={"starts_fd": starts_fd}, fds=(starts_fd,))
            grace_s = config.frontend.shutdown_s + ENGINE_STOP_S
            stack.callback(frontend.end, grace_s, lambda: signals.count > 1, FRONTEND_HURRY_S)

            def look_at_front() -> None:
                tick()
                frontend.look_at_start()

            def look_at_engines() -> None:
                tick()
                engines.look()

            engines.wait_ready(progress, look_at_front)
            progress("connecting front ends")
            facts = frontend.wait_ready(FRONTEND_START_S, on_tick=look_at_engines)
            ready.append(frontend)
            if hang_ups:  # the front end may have read its files before the signal
                frontend.hang_up()
            print_ready(config, int(facts["port"]), progress.close())

            def check() -> None:
                signals.check()
                code = frontend.exit_code()
                if code is not None:
                    raise ChildError(f"the front end {describe_exit(code)}")

            failure = watch(engines, check)
        except Stopped:
            progress.close()
            return 0
        except ChildError as error:
            progress.close()
            if error.usage:
                raise ConfigError(str(error)) from error
            failure = str(error)
    return print_error(failure)


def watch(engines: EngineGroup, tick: Tick) -> str:
    """Wait for the death of an engine that is not restarted. Returns the reason, after FAULT_GRACE_S. Raises exceptions
    of tick.
    """
    while not engines.lost:
        tick()
        engines.look(REPORT_S)
    logger.error("%s; clients get errors for %.0f s", engines.lost, FAULT_GRACE_S)
    deadline = time.monotonic() + FAULT_GRACE_S
    with contextlib.suppress(Stopped, ChildError):
        while time.monotonic() < deadline:
            tick()
            time.sleep(REPORT_S)
    return engines.lost
