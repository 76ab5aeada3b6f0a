"""Disturbances of a server: parts of it are killed, or stopped for times below and above the timeouts."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter

import httpx
import numpy as np

from benchmarks.serving.systems import command_line, tree
from soak.soak_clients import Calm

SHORT_S = 0.2  # shorter than any timeout
WELL = 20  # consecutive answers, on separate connections, that show that all workers serve
MEND_S = 300.0  # maximum time until a server must have recovered
SETTLE_S = 2.0  # time for all parts to detect the disturbance
PAUSES_S = (1.0, 5.0)  # between two disturbances
KINDS = ("kill engine", "kill worker", "stop engine", "stop worker", "stop engine shortly", "stop worker shortly")
PART = re.compile(r"blinkpy\.serving\.children (engine|frontend) |blinkpy\.dpu\.(worker) ")


def parts(server: int) -> dict[int, str]:
    """Ids of the long-lived processes of a server, by kind: serve, engine, frontend, worker."""
    found = {server: "serve"}
    for pid in tree(server):
        match = PART.search(command_line(pid))
        if match:
            found[pid] = match[1] or match[2]
    return found


class Disturbances:
    """Disturbances of one server.

    long_s: longer than its lease and its timeout. done: counts by kind. slowest_s: longest time to recovery.
    """

    def __init__(self, server: int, url: str, calm: Calm, long_s: float, rng: np.random.Generator):
        self._server, self._url, self._calm, self._long_s, self._rng = server, url, calm, long_s, rng
        self.done: Counter[str] = Counter()
        self.slowest_s = 0.0

    async def run(self, until: float) -> None:
        """Run disturbances until a time of the monotonic clock; then wait for recovery."""
        while time.monotonic() < until:
            await asyncio.sleep(float(self._rng.uniform(*PAUSES_S)))
            await self._one(str(self._rng.choice(KINDS)))

    async def _one(self, kind: str) -> None:
        part = "engine" if "engine" in kind else "worker"
        pids = [pid for pid, name in parts(self._server).items() if name == part]
        if not pids:
            raise RuntimeError(f"there is no {part}")
        pid, began = int(self._rng.choice(pids)), time.monotonic()
        shortly = kind.endswith("shortly")
        if not shortly:
            self._calm.disturb()
        if kind.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(SHORT_S if shortly else self._long_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.done[kind] += 1
        if not shortly:
            await asyncio.sleep(SETTLE_S)
            await self._until_well()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self._calm.now = True

    async def _until_well(self) -> None:
        deadline, well = time.monotonic() + MEND_S, 0
        while well < WELL:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is not well again {MEND_S:.0f} s after a disturbance")
            try:
                async with httpx.AsyncClient(timeout=MEND_S) as client:
                    well = well + 1 if (await client.get(f"{self._url}/health")).status_code == 200 else 0
            except httpx.HTTPError:
                well = 0
            if not well:
                await asyncio.sleep(0.1)
