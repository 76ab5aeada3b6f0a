"""A Ray cluster: placement of actors, and calls of their methods. Only this module uses Ray, except for the
address of a node.
"""

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from blinkpy.config import ConfigError, as_table, split_address
from blinkpy.packages import require_packages
from blinkpy.processes import child_environment
from blinkpy.ray_fleet.actors import EngineActor, FrontEndActor
from blinkpy.ray_fleet.fleet_plan import FleetPlan

LOOPBACK = "127.0.0.1"
AUTO = "auto"  # selects the cluster that contains this machine
REACH_S = 5.0  # time limit for a connection; Ray's own is minutes
LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # also used on Linux, because Ray has no option for it
OBJECT_STORE_BYTES = 80 << 20  # of a cluster started here: about Ray's minimum
CONCURRENT_CALLS = 8  # concurrent calls of one actor; each waits in a thread
TEXT = 300  # maximum characters of Ray's messages in the log


class ActorLostError(Exception):
    """An actor is lost, or its method raised an unexpected exception. The message gives the reason."""


class RayCluster:
    """A connection to a cluster until close(). Raises ConfigError.

    address: a running cluster's address; "": start a cluster on this machine, which close() ends.
    own: the cluster was started here.
    """

    def __init__(self, plan: FleetPlan, address: str = ""):
        require_packages("ray up", "ray", extra="ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable Ray's usage statistics by default
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        if not address or _is_loopback(address):
            os.environ[LOOPBACK_ALONE] = "0"  # Ray then listens only on 127.0.0.1; read at Ray's import
        import ray

        self._ray = ray
        self._plan = plan
        self.own = not address
        self.namespace = f"blinkpy-{os.getpid()}"
        how: dict[str, Any] = {"address": address or "local", "namespace": self.namespace, "logging_level": logging.WARNING}
        path = child_environment().get("PYTHONPATH")
        how["runtime_env"] = {"env_vars": {"PYTHONPATH": path}} if path else None
        if not address:
            how |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        if address and address != AUTO:
            _check_reachable(address)
        try:
            ray.init(**how)
        except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
            raise ConfigError(f"can't reach a Ray cluster at {address or LOOPBACK}: {brief(error)}") from error
        try:
            self._home = None if plan.crosses_machines else home_node(ray.nodes(), plan)
        except ConfigError:
            ray.shutdown()
            raise

    def place_engine(self, number: int, start: int) -> Any:
        """Create an actor for an engine. start: number of previous actors for this engine."""
        plan = self._plan
        needs = {"num_gpus": plan.engine_gpus, "num_cpus": plan.engines.cpus, "resource": plan.engines.resource}
        table, crosses = dict(as_table(plan.engine_config())), plan.crosses_machines
        return self._place(EngineActor, f"engine-{number}-{start}", needs, table, number, crosses)

    def place_front_end(self, number: int, start: int) -> Any:
        """Create an actor for a front end. start: number of previous actors for this front end."""
        plan = self._plan
        needs = {"num_gpus": 0, "num_cpus": plan.front_ends.cpus, "resource": plan.front_ends.resource}
        table, crosses = dict(as_table(plan.front_end_config(number))), plan.crosses_machines
        return self._place(FrontEndActor, f"front-end-{number}-{start}", needs, table, number, crosses)

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Start a call. Returns a reference to its result."""
        return getattr(actor, method).remote(*arguments)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait until at least one call has ended, for at most timeout_s. Returns the ended calls."""
        ended, open_calls = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if ended and open_calls:
            ended += self._ray.wait(open_calls, num_returns=len(open_calls), timeout=0)[0]
        return list(ended)

    def result(self, call: Any) -> Any:
        """The result of an ended call. Raises ActorLostError."""
        try:
            return self._ray.get(call, timeout=1)
        except self._ray.exceptions.RayError as error:
            raise ActorLostError(brief(error)) from error

    def kill(self, actor: Any) -> None:
        """End an actor and its processes immediately."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Leave the cluster: its actors end. A cluster started here ends, too."""
        self._ray.shutdown()

    def _place(self, kind: type, name: str, needs: Mapping[str, Any], *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy: Any = "DEFAULT" if self._home is None else NodeAffinitySchedulingStrategy(self._home, soft=False)
        remote = self._ray.remote(kind).options(
            name=name,
            num_gpus=needs["num_gpus"],
            num_cpus=needs["num_cpus"],
            resources={needs["resource"]: 0.001} if needs["resource"] else None,
            scheduling_strategy=strategy,
            max_concurrency=CONCURRENT_CALLS,
        )
        return remote.remote(*arguments)


def home_node(nodes: Sequence[Mapping[str, Any]], plan: FleetPlan) -> str:
    """The node for all engines and front ends that share memory: the node with most GPUs that has the
    required resources.

    nodes: the result of ray.nodes().
    Raises ConfigError if no node has enough resources for the minimum number of engines.
    """
    wanted = {"GPU": plan.engine_gpus * plan.engines.least, "CPU": plan.engines.cpus * plan.engines.least}
    wanted["CPU"] += plan.front_ends.cpus * plan.front_ends.number
    named = [name for name in (plan.engines.resource, plan.front_ends.resource) if name]
    able = [
        (node["Resources"].get("GPU", 0.0), node["Resources"].get("CPU", 0.0), node["NodeID"])
        for node in nodes
        if node["Alive"]
        and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items())
        and all(node["Resources"].get(name, 0.0) > 0 for name in named)
    ]
    if not able:
        needs = [f"{amount:g} {name}" for name, amount in wanted.items() if amount] + named
        raise ConfigError(
            f"no node of the Ray cluster has {' and '.join(needs) or 'space'}, as {plan.engines.least} engines need"
        )
    return str(max(able)[2])


def _check_reachable(address: str) -> None:
    """Raise ConfigError if the address does not accept connections."""
    host, port = split_address(address, "address")
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        raise ConfigError(f"can't reach a Ray cluster at {address}: {error.strerror or error}") from error


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(split_address(address, "address")[0]).is_loopback
    except ValueError:  # a host name, or auto
        return False


def brief(error: BaseException) -> str:
    """The start of a Ray error's text, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:TEXT] or type(error).__name__
