"""The demonstration model served where torch can't be imported."""

import os
import re
from pathlib import Path

import httpx
import pytest
from support.commands import Command

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of all processes of a command: Python reads sitecustomize.py first."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_chat_and_completions(env: dict[str, str]) -> None:
    server = Command("serve", "--port", "0", env=env)
    try:
        url = server.find(re.compile(r"blinkpy serves demo on (http://\S+) "))[1]
        greedy = {"model": "demo", "temperature": 0, "max_tokens": 12}
        text = {"prompt": "The captain of the ship", **greedy}
        completion = httpx.post(f"{url}/v1/completions", json=text, timeout=60).json()["choices"][0]["text"]
        assert len(completion.split()) > 5, "words of English"
        stream = httpx.post(f"{url}/v1/completions", json={**text, "stream": True}, timeout=60).text
        assert stream.endswith("data: [DONE]\n\n")
        messages = [{"role": "user", "content": "Tell me a story."}]
        chat = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, **greedy}, timeout=60).json()
        assert chat["usage"]["completion_tokens"] > 0
        assert chat["choices"][0]["message"]["content"]
    finally:
        assert server.end(60) == 0


def test_options_that_need_torch_name_it(env: dict[str, str]) -> None:
    engine = Command("engine", "demo", "--device", "cpu", "--dtype", "bfloat16", env=env)
    assert engine.wait(300) == 2
    assert "dtype bfloat16 on the CPU needs torch (pip install 'blinkpy-serve[torch]')" in "".join(engine.said)
