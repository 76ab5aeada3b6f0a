"""The attacks of the benchmark reach a server and have the stated effect; the computation of its figures.
Nothing here is timed."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import serving
from support.front_end.tiny_tokenizer import write_model

from benchmarks.serving.attackers import Site, carry_out

LONGEST_S = 120.0  # for all of them to show
SCALE = 0.05
# One of the answers that the attacker sees, or the server's number of connections.
EXPECTED = {
    "idle connections": 1500 * SCALE,
    "endless trailers": {"431", "ended: ConnectionResetError", "ended: BrokenPipeError"},
    "unread pipelines": {"ended: ConnectionResetError", "ended: BrokenPipeError"},
    "nested bodies": {"400", "413", "429", "503"},
    "abandoned prompts": {"left"},
    "unfinished bodies": {"503"},
    "refused connections": {"400"},
    "flood of requests": {"200"},
    "silent handshakes": {"handshakes"},
    "tiny chunks": {"400"},
    "dripping bodies": {"connections"},
    "reset requests": {"left"},
    "crowd at once": {"200", "400", "404"},
}


def test_attacks_reach_their_limits(tmp_path: Path) -> None:
    """All at the same time; the server serves during them and afterwards."""
    seen: dict[str, Counter[str]] = {name: Counter() for name in EXPECTED}
    with FakeEngine() as engine, serving(engine, write_model(tmp_path), api_key="k", body_budget_mib=64) as server:
        site, until = Site(server.port, "k", engine.segment_name, 0, SCALE), time.monotonic() + LONGEST_S
        server.client.headers["authorization"] = "Bearer k"

        def shown(name: str) -> bool:
            expected = EXPECTED[name]
            if isinstance(expected, set):
                return bool(expected & seen[name].keys())
            return len(server.server.connections.open) >= expected

        hidden = set(EXPECTED)

        async def run() -> None:
            attacking: list[asyncio.Task[None]] = [
                asyncio.create_task(carry_out(name, site, until, seen[name])) for name in EXPECTED
            ]
            while hidden and time.monotonic() < until:
                hidden.difference_update(list(filter(shown, hidden)))
                await asyncio.sleep(0.05)
                assert not any(task.done() for task in attacking)
            for task in attacking:
                task.cancel()
            await asyncio.wait(attacking)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(uvloop.run, run())
            while not done.done():
                assert server.client.get("/health").status_code == 200
                time.sleep(0.1)
            done.result()
        assert not hidden, seen
        assert server.complete([7], max_tokens=1).status_code == 200
    assert not any("500" in found for found in seen.values())
    assert not any("401" in found for name, found in seen.items() if name != "crowd at once"), "the crowd has wrong keys, too"
