"""The process that prepares large requests, by blinkpy.dpu.fork_server.forked_jobs.

A job is a line, with its kind and limits as JSON, and the request's body. The answer is a pickled result or error.
"""

import json
import pickle
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from blinkpy.config import Config, options
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fork_server.forked_jobs import ForkBudget, serve_jobs
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader


def pack_head(kind: str, limits: EngineLimits) -> bytes:
    """The bytes before a job's body."""
    return json.dumps([kind, *limits]).encode() + b"\n"


def prepared(reader: RequestReader, job: bytes) -> bytes:
    """The answer to a job."""
    head, _, body = job.partition(b"\n")
    kind, *limits = json.loads(head)
    return pickle.dumps(_result(kind, body, EngineLimits(*limits), reader))


def _result(kind: str, body: bytes, limits: EngineLimits, reader: RequestReader) -> tuple[str, Any]:
    try:
        return "result", JOBS[kind](reader, body, limits)
    except ApiError as error:
        if error.code == "invalid_json" and "memory" in error.message:  # orjson's message when it is out of memory
            return "too much", None
        return "error", (error.status, error.message, error.param, error.code, error.limit)
    except (MemoryError, RecursionError):
        return "too much", None
    except Exception:
        return "fault", traceback.format_exc()


if __name__ == "__main__":
    table, folder = json.load(sys.stdin)
    known = {item.name for _, item in options()}
    own = RequestReader(Config().with_options({name: value for name, value in table.items() if name in known}), Path(folder))
    serve_jobs(
        int(sys.argv[1]),
        partial(prepared, own),
        ForkBudget(own.options.prepare_ms / 1000, own.options.prepare_mib << 20, 0.0),
    )
