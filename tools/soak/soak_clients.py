"""Clients that send random requests of a pool, cancel some, and check all answers."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import numpy as np

from soak.soak_requests import Answer, Judge, SoakRequest

CANCELLED_SHARE = 0.15
ANSWER_S = 180.0  # until a request counts as hanging
PAUSE_S = 0.05  # after a refusal


@dataclass
class Calm:
    """Whether the server is undisturbed: then no request may fail. number: of disturbances that may end requests."""

    now: bool = True
    number: int = 0

    def disturb(self) -> None:
        self.now, self.number = False, self.number + 1


@dataclass
class Clients:
    """Clients with random requests.

    go: cleared while no new request may begin. faults: violations.
    """

    url: str
    pool: list[SoakRequest]
    judge: Judge
    calm: Calm
    rng: np.random.Generator
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    running: int = 0

    def __post_init__(self) -> None:
        self.go, self._ended = asyncio.Event(), False
        self.go.set()

    async def run(self, at_once: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Run until stop() or cancellation. at_once: concurrent requests."""
        limits = httpx.Limits(max_keepalive_connections=0)  # the kernel spreads new connections over workers
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, limits=limits) as client:
            await asyncio.gather(*(self._requests(client, wanted) for _ in range(at_once)))

    def stop(self) -> None:
        self._ended = True
        self.go.set()

    async def pause(self) -> None:
        """Begin no new request, and wait until the running ones have ended."""
        self.go.clear()
        while self.running:
            await asyncio.sleep(0.05)

    async def _requests(self, client: httpx.AsyncClient, wanted: Callable[[], bool]) -> None:
        while not self._ended and wanted():
            await self.go.wait()
            number = int(self.rng.integers(0, len(self.pool)))
            self.running += 1
            calm, disturbances = self.calm.now, self.calm.number
            try:
                outcome = await self._request(client, number)
            finally:
                self.running -= 1
            self.outcomes[outcome] += 1
            refused = outcome.startswith("429")
            fine = refused or outcome in ("whole", "cancelled")
            if not fine and calm and disturbances == self.calm.number:
                self.faults.append(f"request {number} failed while nothing was wrong: {outcome}")
            if not fine or refused:
                await asyncio.sleep(PAUSE_S)

    async def _request(self, client: httpx.AsyncClient, number: int) -> str:
        """The outcome of a request: whole, cancelled, a status, or its fault."""
        request, answer = self.pool[number], Answer()
        cancel_after = int(self.rng.integers(1, 30)) if self.rng.random() < CANCELLED_SHARE else 0
        try:
            async with asyncio.timeout(ANSWER_S):
                outcome = await self._answer(client, request, answer, cancel_after)
        except TimeoutError:
            self.faults.append(f"request {number} hangs")
            outcome = "hang"
        except (httpx.HTTPError, httpx.StreamError) as error:
            outcome = type(error).__name__
        answer.whole = outcome == "whole"
        fault = self.judge.fault(number, answer)
        if fault:
            self.faults.append(f"request {number}, {outcome}: {fault}")
        return outcome

    async def _answer(self, client: httpx.AsyncClient, request: SoakRequest, answer: Answer, cancel_after: int) -> str:
        async with client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200 or not request.stream:
                if cancel_after and response.status_code == 200:
                    return "cancelled"
                content = await response.aread()
                if response.status_code == 200:
                    answer.take(json.loads(content))
                    return "whole"
                if response.status_code not in (429, 503):
                    self.faults.append(f"status {response.status_code}: {content[:300]!r} to {json.dumps(request.body)[:300]}")
                    return str(response.status_code)
                return f"{response.status_code} {json.loads(content)['error']['code']}"
            events = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return "whole"
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"]["code"])
                answer.take(event)
                events += 1
                if events == cancel_after:
                    return "cancelled"
            return "unfinished"
