"""`blinkpy ray up CONFIG`: a fleet in a Ray cluster, for as long as this process runs."""

import contextlib

from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.process_exit import Signals, Stopped
from blinkpy.ray_fleet.fleet_keeper import FleetKeeper
from blinkpy.ray_fleet.fleet_plan import read_plan
from blinkpy.ray_fleet.ray_cluster import RayCluster
from blinkpy.ray_fleet.ray_options import RayOptions


def run_ray(options: RayOptions) -> int:
    """Run the fleet until a signal. Returns the exit code. Raises ConfigError."""
    plan = read_plan(options.path)
    start_logging("ray", plan.config.frontend.log_level, plan.config.watch.log_format)
    name = plan.config.model.served_model_name or plan.config.model.model

    def ready(urls: list[str]) -> None:
        for url in urls:
            print(f"blinkpy serves {name} on {url} (Ctrl-C ends it)", flush=True)

    with contextlib.suppress(Stopped), contextlib.ExitStack() as stack:
        cluster = RayCluster(plan, options.address)
        stack.callback(cluster.close)
        signals = stack.enter_context(Signals().caught())  # after Ray's own handlers
        keeper = FleetKeeper(plan, cluster, ready)
        stack.callback(keeper.end, lambda: signals.count > 1)
        while True:
            signals.check()
            keeper.turn()
    return 0
