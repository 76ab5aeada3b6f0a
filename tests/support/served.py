"""`blinkpy serve` as users run it, with the official client."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from support.commands import Command
from support.waiting import BUSY_S

from benchmarks.serving.systems import command_line, parent_of, tree

STORY = [{"role": "user", "content": "Tell me a story."}]
JOB_SERVERS = re.compile(r"\.(job|compile)_server")
LINE = re.compile(r"blinkpy serves (\S+) on (http://\S+) ")


def programs_below(pid: int) -> list[int]:
    """The descendants of a process, without a fork that has not started its program yet: it has its parent's command line."""
    found = []
    for one in tree(pid)[1:]:
        with contextlib.suppress(OSError):  # it ended
            if command_line(one) != command_line(parent_of(one)):
                found.append(one)
    return found


HELD = """
import os, sys, time
while "engine" in sys.orig_argv and not os.path.exists({gate!r}) and os.getppid() > 1:
    time.sleep(0.01)
"""


def held_environment(folder: Path) -> tuple[dict[str, str], Path]:
    """(environment, gate): with this environment, each engine of a server waits at its start until the file `gate` exists."""
    gate = folder / "gate"
    (folder / "sitecustomize.py").write_text(HELD.format(gate=str(gate)))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}, gate


class Server(Command):
    """A running `blinkpy serve`."""

    def connect(self) -> None:
        """Wait until the server is ready, and connect a client."""
        self.model, self.url = self.find(LINE).groups()
        self.find(re.compile("^curl "))
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=BUSY_S)

    def child(self, entry: str) -> int:
        """Process id of the engine or the front end."""
        return next(pid for pid in self.children() if f" {entry} " in command_line(pid))

    def children(self, jobs: bool = False) -> list[int]:
        """The server's descendants. jobs: include the workers' children for large bodies and grammars."""
        below = sorted(programs_below(self.process.pid))
        return below if jobs else [pid for pid in below if not JOB_SERVERS.search(command_line(pid))]

    def segments(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"blinkpy.serve-{self.process.pid}-*")]

    def chat(self, **more: object) -> str:
        answer = self.client.chat.completions.create(model=self.model, messages=STORY, max_tokens=16, **more)
        assert answer.usage.completion_tokens <= 16
        return answer.choices[0].message.content or ""

    def stream(self, tokens: int) -> Iterator[ChatCompletionChunk]:
        """A streamed answer of this number of tokens."""
        options = {"model": self.model, "max_tokens": tokens, "stream": True, "extra_body": {"ignore_eos": True}}
        return iter(self.client.chat.completions.create(messages=STORY, **options))


@contextlib.contextmanager
def serving(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server("serve", "--port", "0", *arguments, env=env)
    try:
        server.connect()
        yield server
    finally:
        server.end()
