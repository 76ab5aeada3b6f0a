"""Agents for the command line, unmodified: each does a task with its own tools, by the protocol that it speaks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(sys.prefix) / "node" / "node_modules" / ".bin"
TEXT, SAYS = "WRITE It was a dark night.", "It was a dark night."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
OBJECT = {"city": "Oslo", "sunny": True}


class Shell:
    """Runs agents in a separate folder, next to a separate home."""

    def __init__(self, folder: Path) -> None:
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()

    def run(self, name: str, *arguments: str, text: str = "", **environment: str) -> str:
        """The standard output of a program that must end with 0."""
        program = PROGRAMS / name
        assert program.exists(), f"{program} is missing: make test-clients installs it"
        kept = {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.home), "TERM": "dumb", "CI": "1"}
        done = subprocess.run(
            [program, *arguments],
            cwd=self.work,
            env={**kept, "DO_NOT_TRACK": "1", **environment},
            input=text,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    assert shutil.which("node"), "the agents need Node 20 or later (Debian: apt install npm)"
    return Shell(tmp_path)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_claude_code(scripted: Any, shell: Shell) -> None:
    """By /v1/messages: it reasons, writes a file by a command, reads it by a tool, and ends."""
    server = {
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_AUTH_TOKEN": scripted.key,
        "ANTHROPIC_MODEL": scripted.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": scripted.model,
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    assert shell.run("claude", "-p", TEXT, **server).strip() == SAYS
    path = shell.work / "note.txt"
    steps = (
        f'THINK A note.\nCALL Bash {{"command": "echo from the agent > {path}", "description": "write"}}',
        f'CALL Read {{"file_path": "{path}"}}',
        f'CALL Edit {{"file_path": "{path}", "old_string": "agent", "new_string": "editor"}}',
        TEXT,
    )
    tools = ("--allowedTools", "Bash,Read,Edit", "--output-format", "stream-json", "--verbose", "--include-partial-messages")
    events = lines(shell.run("claude", "-p", "\n".join(steps), *tools, **server))
    assert path.read_text() == "from the editor\n"
    assert (events[-1]["type"], events[-1]["is_error"], events[-1]["result"]) == ("result", False, SAYS)
    assert sum(event["type"] == "stream_event" for event in events) > 20
    asked = f"CALL StructuredOutput {json.dumps(OBJECT)}"
    typed = shell.run("claude", "-p", asked, "--json-schema", json.dumps(SCHEMA), "--output-format", "json", **server)
    assert json.loads(typed)["structured_output"] == OBJECT


def test_codex(scripted: Any, shell: Shell) -> None:
    """By /v1/responses."""
    (shell.home / ".codex").mkdir()
    provider = f'name = "local"\nbase_url = "{scripted.base}"\nwire_api = "responses"\nenv_key = "KEY_OF_TEST"\n'
    settings = f'model = "{scripted.model}"\nmodel_provider = "local"\n[model_providers.local]\n{provider}'
    (shell.home / ".codex" / "config.toml").write_text(settings)

    def run(task: str, *more: str) -> str:
        how = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", *more)
        events = lines(shell.run("codex", *how, task, KEY_OF_TEST=scripted.key))
        return str([event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"][-1])

    assert run(TEXT) == SAYS
    task = 'THINK A note.\nCALL exec_command {"cmd": "echo from the agent > note.txt"}\nCALL exec_command {"cmd": "cat note.txt"}'
    assert "from the agent" in run(task)
    assert (shell.work / "note.txt").read_text() == "from the agent\n"
    (shell.work / "schema.json").write_text(json.dumps(SCHEMA))
    assert json.loads(run(f"WRITE {json.dumps(OBJECT)}", "--output-schema", "schema.json")) == OBJECT


def test_qwen_code(scripted: Any, shell: Shell) -> None:
    """By /v1/chat/completions."""
    server = {"OPENAI_API_KEY": scripted.key, "OPENAI_BASE_URL": scripted.base, "OPENAI_MODEL": scripted.model}
    assert shell.run("qwen", "-p", TEXT, **server).strip() == SAYS
    path = shell.work / "note.txt"
    task = (
        'CALL run_shell_command {"command": "echo from the agent > note.txt", "is_background": false}\n'
        f'CALL read_file {{"file_path": "{path}"}}'
    )
    assert "from the agent" in shell.run("qwen", "-p", task, "--yolo", **server)
    assert path.read_text() == "from the agent\n"


def test_opencode(scripted: Any, shell: Shell) -> None:
    """By /v1/chat/completions, with the AI SDK."""
    options = {"baseURL": scripted.base, "apiKey": scripted.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {scripted.model: {"name": "local"}}}
    settings = {"provider": {"local": provider}, "model": f"local/{scripted.model}", "permission": {"*": "allow"}}
    (shell.work / "opencode.json").write_text(json.dumps(settings))

    def run(task: str) -> str:
        events = lines(shell.run("opencode", "run", "--format", "json", text=task))
        return str([event["part"]["text"] for event in events if event["type"] == "text"][-1])

    assert run(TEXT) == SAYS
    path = shell.work / "note.txt"
    written = f'CALL write {{"filePath": "{path}", "content": "from the agent"}}'
    task = f'{written}\nCALL bash {{"command": "cat {path}", "description": "c"}}'
    assert "from the agent" in run(task)
    assert path.read_text() == "from the agent"
