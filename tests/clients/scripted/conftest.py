"""A server whose model follows a script in the conversation (support.front_end.scripted_agent)."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
SERVES = re.compile(r"blinkpy serves (\S+) on (http://\S+) ")
KEY = "a-key-of-the-test"


class Scripted:
    """The server. url: without /v1."""

    model, key = "scripted", KEY

    def __init__(self, url: str) -> None:
        self.url, self.base = url, f"{url}/v1"


@pytest.fixture(scope="session")
def scripted() -> Iterator[Scripted]:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [os.environ["BLINKPY_PYTHON"], "-m", "support.front_end.scripted_agent", "--key", KEY]
    process: Any = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent)
    try:
        found = SERVES.search(process.stdout.readline())
        assert found, "the server did not start; its messages are above"
        yield Scripted(found[2])
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """Clients send no statistics, and look for no news."""
    os.environ |= {
        "AGNO_TELEMETRY": "false",
        "DO_NOT_TRACK": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
