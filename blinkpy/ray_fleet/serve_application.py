"""An application of Ray Serve's, whose replicas are forwarders: it shows a fleet's front ends behind Serve's proxy. What the
package knows of Ray Serve stands here."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.packages import require_packages
from blinkpy.ray_fleet.fleet_plan import FleetPlan
from blinkpy.ray_fleet.forwarder import Forwarder
from blinkpy.ray_fleet.forwarder_client import ForwarderClient
from blinkpy.ray_fleet.forwarding_rules import MOST_OPEN, MOST_WAITING, FrontEndChoice
from blinkpy.ray_fleet.front_end_list import FrontEndList
from blinkpy.ray_fleet.ray_cluster import RayCluster, brief

LIST = "list-of-front-ends"  # an actor
READY_S = 120.0  # for replicas, with the wait for a node
LEFT_S = 15.0  # for an application of a fleet that was killed to be gone
POLL_S = 0.5  # between looks at Serve, until it shows the application
TELL_S = 2.0  # between words to the list, which may have been started again
ASK_S = 0.25  # between questions of a replica to the list
ANSWER_S = 5.0  # for an answer of the list
LOST_S = 5.0  # without the list, before a replica takes its application for one that was left

logger = logging.getLogger("blinkpy.ray")


class ServeApplication:
    """Deployed until close(). check: called again and again until it runs; it may raise. Raises ConfigError.

    Where Serve does not run yet, it is started, and ended in close() unless others have come to use it."""

    def __init__(self, plan: FleetPlan, cluster: RayCluster, check: Callable[[], None]):
        require_packages("[serve] of ray up", "aiohttp", "fastapi", "starlette", extra="ray-serve")
        from ray import serve

        assert plan.serve is not None
        self._serve, self._plan, self._cluster, self._options = serve, plan, cluster, plan.serve
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._list: Any = None
        self._urls: list[str] = []
        self._told_at = 0.0
        self._started = self._deployed = False
        try:
            self._deploy(check)
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        """Of Serve's proxy, for people."""
        options = self._options
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"http://{host}:{options.port}{options.route}" if self._started else options.route

    def follow(self, urls: Sequence[str]) -> None:
        """These front ends serve."""
        now = time.monotonic()
        if list(urls) != self._urls or now - self._told_at >= TELL_S:
            self._urls, self._told_at = list(urls), now
            self._cluster.call(self._list, "set_urls", self._urls)

    def close(self) -> None:
        """Remove it. With a cluster of our own, Serve ends."""
        if self._cluster.own:
            return
        with contextlib.suppress(*self._errors()):
            if self._deployed:
                self._deployed = False
                self._serve.delete(self._options.name)
            if self._started and not self._serve.status().applications:
                self._started = False
                self._serve.shutdown()

    def _deploy(self, check: Callable[[], None]) -> None:
        try:
            self._await_name(check)
            self._list = self._cluster.place_list(FrontEndList, LIST)
            if not self._serve.status().proxies:
                self._check_port()
                self._started = True
                where = {"host": self._options.host, "port": self._options.port}
                self._serve.start(http_options=where, logging_config={"log_level": "WARNING"})
            self._deployed = True
            target = self._serve.RunTarget(self._application(), self._options.name, self._options.route)
            self._serve.run_many([target], wait_for_applications_running=False)
            self._await_running(check)
        except ConfigError:
            raise
        except self._errors() as error:
            raise ConfigError(f"Ray Serve does not take the application {self._options.name}: {brief(error)}") from error

    def _errors(self) -> tuple[type[BaseException], ...]:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        return RayError, RayServeException, OSError, RuntimeError, TimeoutError, ValueError

    def _await_name(self, check: Callable[[], None]) -> None:
        """The application of a fleet that was killed removes itself. Raises ConfigError for another one of this name."""
        name, deadline = self._options.name, time.monotonic() + LEFT_S
        while name in self._serve.status().applications:
            check()
            if time.monotonic() > deadline:
                raise ConfigError(f"Ray Serve has an application {name} already: serve.name gives this one another name")
            time.sleep(POLL_S)

    def _check_port(self) -> None:
        """Raise ConfigError for a port of the proxy that a front end will want."""
        plan, port = self._plan, self._options.port
        if port in map(plan.port, range(plan.front_ends.number)):
            raise ConfigError(f"serve.port {port} is a front end's: Ray Serve's proxy needs one of its own")

    def _await_running(self, check: Callable[[], None]) -> None:
        name, deadline = self._options.name, time.monotonic() + READY_S
        while True:
            check()
            found = self._serve.status().applications.get(name)
            if found is not None and found.status == "RUNNING":
                return
            if (found is not None and found.status == "DEPLOY_FAILED") or time.monotonic() > deadline:
                raise TimeoutError((found and found.message) or f"no replica runs after {READY_S:.0f} s")
            time.sleep(POLL_S)

    def _application(self) -> Any:
        options, config, home = self._options, self._plan.config, self._cluster.home_resource
        make_forwarder = forwarder_builder(options.name, options.route, config.frontend.keep_alive_s, self._cluster.namespace)
        deployment = self._serve.deployment(
            name="forwarder",
            num_replicas=options.replicas,
            ray_actor_options={"num_cpus": 0, "resources": {home: 0.001} if home else {}},
            max_ongoing_requests=MOST_OPEN,
            max_queued_requests=MOST_WAITING,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=max(1.0, config.frontend.shutdown_s),
            logging_config={"enable_access_log": False, "log_level": "WARNING"},  # front ends have an access log
        )
        return deployment(self._serve.ingress(make_forwarder)()).bind()


def forwarder_builder(name: str, route: str, keep_s: float, namespace: str) -> Callable[[], Forwarder]:
    """What a replica calls. name: of the application; namespace: of the fleet's actors."""

    def make_forwarder() -> Forwarder:  # Serve wants a function, and sends it with what it refers to
        return Forwarder(
            route,
            lambda: ForwarderClient(keep_s),
            lambda choice: asyncio.ensure_future(follow_list(choice, name, namespace)),
        )

    return make_forwarder


async def follow_list(choice: FrontEndChoice, name: str, namespace: str) -> None:
    """In a replica: ask for the front ends, again and again. When the list is gone its fleet was killed, and nobody else
    removes the application."""
    import ray
    from ray import serve

    seen, front_ends = time.monotonic(), None
    while time.monotonic() - seen < LOST_S:
        try:
            front_ends = front_ends or ray.get_actor(LIST, namespace)
            urls = await asyncio.wait_for(front_ends.urls.remote(), ANSWER_S)
            seen = time.monotonic()
            if urls is not None:  # it was not just started again
                choice.follow(urls)
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            front_ends = None
        await asyncio.sleep(ASK_S)
    logger.error("the fleet of this application is gone: it ends")
    await asyncio.to_thread(serve.delete, name)
