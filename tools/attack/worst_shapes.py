"""The API's bodies that need most CPU time for their preparation: `python -m attack.worst_shapes --size
1700`.

Each field of each path in each shape (benchmarks/serving/attack_shapes.py) is prepared in this process as
in a worker. The minimum of several runs counts, so a busy machine matters little.
"""

import argparse
import time
from typing import NamedTuple

from benchmarks.serving.attack_shapes import FIELDS, SHAPES, body_of_field
from blinkpy.config import Config
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader
from blinkpy.models.weights.model_folder import DEMO_FOLDER

KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/messages": "message",
    "/v1/messages/count_tokens": "message_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
LIMITS = EngineLimits(2048, 4096)


class Cost(NamedTuple):
    """Milliseconds of CPU time to prepare a body."""

    ms: float
    size: int  # bytes
    path: str
    field: str
    shape: str
    outcome: str  # "ok", or the code of the error

    def __str__(self) -> str:
        return f"{self.ms:8.2f} ms, {self.size:7,} bytes: {self.path} {self.field} as {self.shape}: {self.outcome}"


def cost_of(reader: RequestReader, path: str, field: str, shape: str, size: int, runs: int) -> Cost:
    """The minimum of several runs."""
    body, best, outcome = body_of_field(path, field, shape, size), float("inf"), "ok"
    for _ in range(runs):
        began = time.thread_time()
        try:
            JOBS[KINDS[path]](reader, bytearray(body), LIMITS)
        except ApiError as error:
            outcome = str(error.code)
        best = min(best, 1000 * (time.thread_time() - began))
    return Cost(best, len(body), path, field, shape, outcome)


def costs(size: int, runs: int) -> list[Cost]:
    """Costs of every field in every shape, in descending order."""
    reader = RequestReader(Config(), DEMO_FOLDER)
    found = [
        cost_of(reader, path, field, shape, size, runs) for path, fields in FIELDS.items() for field in fields for shape in SHAPES
    ]
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attack.worst_shapes", description=__doc__)
    parser.add_argument("--size", type=int, default=1700, help="bytes of a body")
    parser.add_argument("--runs", type=int, default=3, help="of each, of which the fastest counts")
    parser.add_argument("--show", type=int, default=40, help="lines")
    options = parser.parse_args()
    for cost in costs(options.size, options.runs)[: options.show]:
        print(cost)


if __name__ == "__main__":
    main()
