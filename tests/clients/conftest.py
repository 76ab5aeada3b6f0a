"""A server with the demonstration model, for clients that know it by its address alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command

HERE = Path(__file__).parent
NODE = Path(sys.prefix) / "node"  # next to this environment's packages, those for Node
SERVES = re.compile(r"blinkpy serves (\S+) on (http://\S+) ")
KEY = "a-key-of-the-test"


class Served:
    """A running server. url: without /v1."""

    def __init__(self, model: str, url: str) -> None:
        self.model, self.url, self.key = model, url, KEY
        self.base = f"{url}/v1"

    def post(self, path: str, **fields: object) -> dict[str, Any]:
        """An answer by plain HTTP, to compare with."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def chat(self, text: str, **fields: object) -> str:
        """The model's answer with temperature 0."""
        answer = self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], temperature=0, **fields)
        return str(answer["choices"][0]["message"]["content"])

    def run_node(self, script: str, text: str) -> dict[str, Any]:
        """The output of a script of this folder, run with the packages for Node."""
        environment = {**os.environ, "BASE": self.base, "KEY": KEY, "MODEL": self.model, "TEXT": text}
        command = ["node", shutil.copy(HERE / script, NODE)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    # Clients that look for their own news on the internet need not find any.
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    if url := os.environ.get("CLIENTS_URL"):  # of a server that runs, with the same options
        yield Served("demo", url)
        return
    how = ("--device", "cpu", "--dtype", "float32", "--port", "0", "--api-key", KEY, "--grammar-compile-ms", "5000")
    arguments = ("serve", "demo", *how, "--chat-template", str(HERE / "tools.jinja"))
    command = Command(*arguments, python=os.environ["BLINKPY_PYTHON"])
    try:
        yield Served(*command.find(SERVES).groups())
    finally:
        command.end()
