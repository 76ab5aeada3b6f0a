"""An upgrade in place: the installed files change while a front end runs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_end import chat_templates
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.tiny_tokenizer import write_model
from support.waiting import BUSY_S, wait_for

import blinkpy

LARGE = "sea " * 20_000
CONTEXT = 1 << 17
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
USER = [{"role": "user", "content": "Hi"}]
FACTS_OF_GRAMMARS = FACTS._replace(
    max_model_len=CONTEXT, num_pages=CONTEXT, grammar_share=2, grammar_words=1 << 14, grammar_arena=1 << 15
)
SIZES_OF_BODIES = SIZES.__class__(**{**SIZES.__dict__, "prompt_tokens": 2 * CONTEXT, "hash_entries": CONTEXT})


class Installed:
    """A front end that runs from a copy of the package. package: folder of the copy; log: log of the front end."""

    def __init__(self, folder: Path, engine: FakeEngine):
        self.package, self.log = folder / "blinkpy", folder / "log"
        shutil.copytree(Path(blinkpy.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        model = write_model(folder / "model", chat_template=chat_templates.HERMES)
        self.socket = folder / "http"
        options = ("--name", engine.segment_name, "--uds", str(self.socket), "--workers", "1", "--log-level", "info")
        command = [sys.executable, "-m", "blinkpy", "frontend", str(model), *options]
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://x", timeout=BUSY_S)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.socket.exists() and self.client.get("/health").status_code == 200

    def children(self) -> dict[str, int]:
        """Processes of the front end by their module."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
                inside = Path(os.readlink(path.parent / "cwd")) == self.package.parent
            except OSError:
                continue
            found.update(
                {word: int(path.parent.name) for word in words if inside and word.endswith(("job_server", "compile_server"))}
            )
        return found

    def change(self) -> None:
        """Another version, none of whose files can be imported by this one."""
        for path in self.package.rglob("*.py"):
            path.write_text("raise SystemError('of another version')\n")

    def ask(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    with FakeEngine(facts=FACTS_OF_GRAMMARS, sizes=SIZES_OF_BODIES) as engine:
        one = Installed(tmp_path, engine)
        try:
            wait_for(one.ready)
            wait_for(lambda: len(one.children()) == 2)
            # The compile process answers once it has imported all. It forks for each job, so later jobs import for themselves.
            assert (
                one.ask("/v1/chat/completions", messages=USER, response_format=answer_with("a"), max_tokens=2).status_code == 200
            )
            yield one
        finally:
            one.client.close()
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait(BUSY_S)
            for child in one.children().values():
                os.kill(child, signal.SIGKILL)


def answer_with(key: str) -> dict[str, Any]:
    """A response format with one integer."""
    schema = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def requests(installed: Installed, text: str) -> list[int]:
    user = [USER[0] | {"content": text}]
    tool = {"name": "f", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    return [
        installed.ask("/v1/completions", prompt=text, max_tokens=2).status_code,
        installed.ask("/v1/chat/completions", messages=user, tools=[TOOL], max_tokens=2).status_code,
        installed.ask("/v1/chat/completions", messages=user, response_format=answer_with("b"), max_tokens=2).status_code,
        installed.ask("/v1/responses", input=user, max_output_tokens=2).status_code,
        installed.ask("/v1/messages", messages=user, tools=[tool], max_tokens=2).status_code,
        installed.ask("/v1/messages/count_tokens", messages=user).status_code,
        installed.ask("/tokenize", prompt=text).status_code,
    ]


def test_changed_files_break_nothing(installed: Installed) -> None:
    """Neither small nor large bodies, grammars included. A process that dies is started again from the same files alone."""
    children = installed.children()
    os.kill(children["blinkpy.dpu.http.preparation.job_server"], signal.SIGKILL)
    assert installed.ask("/tokenize", prompt=LARGE).status_code == 200, "it is started again"
    installed.change()
    assert requests(installed, "Hi") == [200] * 7
    assert requests(installed, LARGE) == [200] * 7
    assert "have changed" not in installed.log.read_text()
    os.kill(installed.children()["blinkpy.dpu.http.preparation.job_server"], signal.SIGKILL)
    refused = installed.ask("/tokenize", prompt=LARGE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sources_changed")
    assert "restart the server" in refused.json()["error"]["message"]
    wait_for(lambda: "blinkpy's files have changed since this worker started" in installed.log.read_text())
    assert requests(installed, "Hi") == [200] * 7
