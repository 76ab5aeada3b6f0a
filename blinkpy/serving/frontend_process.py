"""Front ends started by this process: as `blinkpy frontend`, or as a child of `serve`."""

from collections.abc import Callable
from pathlib import Path

from blinkpy.config import Config
from blinkpy.dpu.fleet.engine_list import check_engines
from blinkpy.dpu.handover import Inheritance, inherit
from blinkpy.dpu.watch.log_output import end_logging, start_logging
from blinkpy.models.weights.checkpoint import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Signals, end_within, exit_process
from blinkpy.processes import Reporter
from blinkpy.progress import Progress
from blinkpy.serving.addresses import check_access, print_ready

FRONTEND_START_S = 60.0
FRONTEND_HURRY_S = 3.0  # time for workers to answer their clients after a second signal
SPARE_S = 3.0  # after the time limit of the last worker, before the kernel ends the front end
PACKAGES = ("httptools", "jinja2", "msgspec", "orjson", "tokenizers", "uvloop")


def frontend_alone(config: Config, given: frozenset[str]) -> int:
    """Run `blinkpy frontend`: front ends that attach to an engine, waiting for it if necessary.

    given: names of the options that the user set.
    """
    require_packages("a front end", *PACKAGES)  # report them once, before any worker starts
    check_engines(config, given)
    inherited = inherit(config)
    check_access(config, inherited is not None)
    config = find_model(config, Progress(), weights=False)
    code = run_front(config, lambda host, port: print_ready(config, port), inherited=inherited)
    exit_process(code)


def frontend_child(config: Config, reporter: Reporter, starts_fd: int = -1) -> int:
    """Run the front ends as a child of `serve`. starts_fd: of EngineStarts, or -1 if this server does not
    start the engine.
    """
    return run_front(config, lambda host, port: reporter.ready(host=host, port=port), quiet=True, starts_fd=starts_fd)


def run_front(
    config: Config,
    on_ready: Callable[[str, int], None],
    quiet: bool = False,
    starts_fd: int = -1,
    inherited: Inheritance | None = None,
) -> int:
    """Run front ends until SIGTERM or SIGINT, in the main thread. The model must be a local folder.

    quiet: the parent reports a second signal.
    starts_fd: as for frontend_child.
    inherited: sockets from the previous front end.
    """
    from blinkpy.dpu.supervisor import Supervisor, longest_end_s

    start_logging("frontend", config.frontend.log_level, config.watch.log_format)
    supervisor = Supervisor(config, Path(config.model.model), on_ready, starts_fd, inherited)

    def stop(count: int) -> None:
        supervisor.stop()
        end_within(longest_end_s(config) + SPARE_S)

    with Signals(stop, quiet, supervisor.hang_up).caught():
        try:
            return supervisor.run()
        finally:
            end_logging()
