"""docs/api.md names each client that `make test-clients` installs."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "tests" / "clients"
NAMES = {  # packages whose names in the docs differ
    "@ai-sdk/openai": "AI SDK",
    "@ai-sdk/openai-compatible": "AI SDK",
    "ai": "AI SDK",
    "openai": "OpenAI's",
    "anthropic": "Anthropic's",
    "@anthropic-ai/claude-code": "Claude Code",
    "@openai/codex": "Codex",
    "@qwen-code/qwen-code": "qwen-code",
    "opencode-ai": "opencode",
    "langchain-openai": "LangChain",
    "langchain": "LangChain",
    "openai-agents": "the OpenAI Agents SDK",
    "pydantic-ai-slim": "pydantic-ai",
    "llama-index-llms-openai-like": "LlamaIndex",
    "autogen-agentchat": "AutoGen",
    "autogen-ext": "AutoGen",
    "haystack-ai": "Haystack",
    "semantic-kernel": "Semantic Kernel",
}
OTHERS = {"pytest", "pytest-timeout", "mcp", "zod"}  # no clients by themselves


def test_every_client_is_named() -> None:
    packages = set[str]()
    for path in (CLIENTS / "requirements.txt", CLIENTS / "scripted" / "requirements.txt"):
        packages |= set(re.findall(r"^([\w.-]+)", path.read_text(), re.MULTILINE))
    for path in (CLIENTS / "package.json", CLIENTS / "scripted" / "package.json"):
        packages |= set(json.loads(path.read_text())["dependencies"])
    section = (ROOT / "docs" / "api.md").read_text().partition("\n## Agents\n")[2].partition("\n## ")[0]
    names = {NAMES.get(package, package).lower() for package in packages - OTHERS}
    assert {name for name in names if name not in section.lower()} == set()
    assert len(names) == 27 and "these 28" in section  # OpenAI's are two
