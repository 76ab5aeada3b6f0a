"""CPU time that a worker takes to prepare requests on its event loop: the maximum for one body of each kind.

    python -m benchmarks.parts.request_costs

Bodies are filled up to INLINE_BYTES with the most expensive content. Bodies that `is_brief` refuses are cut until it takes them,
since the others are prepared in a thread. Each body is prepared several times; its figure is the minimum time of the thread.
"""

import contextlib
import random
import string
import time
from collections.abc import Callable
from typing import Any

import orjson

from benchmarks.common.harness import Flag, Run, run_benchmark
from blinkpy.config import Config
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.preparation.request_jobs import INLINE_BYTES, JOBS, EngineLimits, RequestReader, is_brief
from blinkpy.models.weights.model_folder import DEMO_FOLDER

TARGET_MS = 1.0
VOCABULARY = 152_000
Make = Callable[[int], dict[str, Any]]


def words(count: int) -> str:
    return " ".join("".join(random.choices(string.ascii_lowercase, k=6)) for _ in range(count))


def user(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}] * count


def function(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}"}}


def schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(count)}}


KINDS: dict[str, tuple[str, Make]] = {
    "text": ("completion", lambda n: {"prompt": words(n)}),
    "token ids": ("completion", lambda n: {"prompt": [7] * n}),
    "prompts": ("completion", lambda n: {"prompt": ["a"] * min(n, 128)}),
    "echo with scores": ("completion", lambda n: {"prompt": [7] * n, "echo": True, "logprobs": 1}),
    "logit_bias": ("completion", lambda n: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(n)}}),
    "allowed_token_ids": ("completion", lambda n: {"prompt": "a", "allowed_token_ids": list(range(n))}),
    "bad_words": ("completion", lambda n: {"prompt": "a", "bad_words": [f"b{i}" for i in range(min(n, 128))]}),
    "choice": ("completion", lambda n: {"prompt": "a", "structured_outputs": {"choice": [f"b{i}" for i in range(n)]}}),
    "messages": ("chat", lambda n: {"messages": user(n)}),
    "tools": ("chat", lambda n: {"messages": user(1), "tools": [function(i) for i in range(n)]}),
    "schema": (
        "chat",
        lambda n: {
            "messages": user(1),
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(n)}},
        },
    ),
    "items": ("response", lambda n: {"input": user(n)}),
    "tokenize": ("tokenize", lambda n: {"prompt": words(n)}),
    "detokenize": ("detokenize", lambda n: {"tokens": [7] * n}),
}


def largest(make: Make) -> bytearray:
    """The largest body of a kind that the event loop prepares."""
    low, high = 1, INLINE_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if is_brief(bytearray(orjson.dumps(make(middle)))):
            low = middle
        else:
            high = middle
    return bytearray(orjson.dumps(make(low)))


def cost_ms(reader: RequestReader, kind: str, body: bytearray, times: int) -> float:
    """The minimum of several runs."""
    least = float("inf")
    for _ in range(times):
        began = time.thread_time()
        with contextlib.suppress(ApiError):  # a refusal costs time, too
            JOBS[kind](reader, bytearray(body), EngineLimits(1 << 17, VOCABULARY))
        least = min(least, time.thread_time() - began)
    return 1000 * least


def benchmark(run: Run) -> None:
    reader, rows = RequestReader(Config(), DEMO_FOLDER), list[dict[str, Any]]()
    for number, (name, (kind, make)) in enumerate(KINDS.items()):
        run.progress("kinds of bodies", number, len(KINDS))
        body = largest(make)
        cost = cost_ms(reader, kind, body, run.options.times) if is_brief(body) else 0.0
        rows.append({"kind": name, "bytes": len(body), "on_the_loop": is_brief(body), "ms": float(f"{cost:.3g}")})
    run.target("longest preparation on the event loop", max(row["ms"] for row in rows), TARGET_MS, "ms")
    run.write(__doc__, {"kinds": rows})


if __name__ == "__main__":
    run_benchmark(
        "parts.request_costs",
        "What bodies cost that a worker prepares on its event loop.",
        benchmark,
        times=Flag(20, "that each body is prepared", smoke=1),
    )
