"""Requests that are prepared in processes of their own, by blinkpy.dpu.http.preparation.job_server."""

import pickle
from pathlib import Path
from typing import Any

from blinkpy.config import Config, as_table
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fork_server.fork_server import ForkServer
from blinkpy.dpu.http.preparation.job_server import pack_head
from blinkpy.dpu.http.preparation.request_jobs import EngineLimits

SERVER = "blinkpy.dpu.http.preparation.job_server"
MARGIN_S = 20.0  # for processes to start and to get their share of the CPU, beside the time to prepare


class JobForks:
    """folder: the model's."""

    def __init__(self, config: Config, folder: Path):
        limit_s = 2 * config.frontend.prepare_ms / 1000 + MARGIN_S
        self._forks = ForkServer(SERVER, [dict(as_table(config)), str(folder)], limit_s)
        self.close = self._forks.close

    async def run(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """The job's result. Whoever cancels this ends the process. Raises ApiError, with status 413 for a job of more time or
        memory than the options allow, and RuntimeError for a fault of the job."""
        answer = await self._forks.run(pack_head(kind, limits), body)
        outcome: str = "too much"
        result: Any = None
        if answer:
            outcome, result = pickle.loads(answer)  # of our own process
        if outcome == "too much":
            message = "Parsing and tokenizing the request takes too much time or memory."
            raise ApiError(413, message, code="too_costly", limit="prepare_ms")
        if outcome == "error":
            status, message, param, code, limit = result
            raise ApiError(status, message, param=param, code=code, limit=limit)
        if outcome == "fault":
            raise RuntimeError(f"a request's preparation failed:\n{result}")
        return result
