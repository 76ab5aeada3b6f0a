"""A server whose engine generates given texts, for tests of tools and reasoning."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.http_server import MODEL, RunningServer, serving
from support.front_end.tiny_tokenizer import byte_level_json, write_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy.dpu.text.tokenizer import Tokenizer

EOS = 1
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>"]
HARMONY = ["<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]  # and the tokenizer's <|start|>
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Any = [WEATHER, TIME]
ARGUMENTS = '{"city": "Zürich \\"Altstadt\\""}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "Hi"}]


class Served:
    """A server whose engine answers with a given text."""

    def __init__(self, engine: FakeEngine, server: RunningServer, client: openai.OpenAI, tokenizer: Tokenizer):
        self.engine, self.server, self.client, self.tokenizer = engine, server, client, tokenizer

    def says(self, text: str) -> None:
        self.engine.script = [*self.tokenizer.encode(text, add_special_tokens=False, parse_special=True).tolist(), EOS]

    def chat(self, text: str, **fields: Any) -> Any:
        """The choices of a whole answer to a chat; checks that a stream equals it."""
        self.says(text)
        ask = {"model": MODEL, "messages": ASK, **fields}
        whole = self.client.chat.completions.create(**ask)
        with self.client.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion()
        for one, other in zip(whole.choices, streamed.choices, strict=True):
            assert one.finish_reason == other.finish_reason
            assert message_of(one) == message_of(other)
        return whole.choices[0]

    def prompt(self) -> str:
        """The text of the last prompt."""
        return str(self.tokenizer.encoder.decode(self.engine.submitted[-1].prompt, skip_special_tokens=False))

    def refused(self, **fields: Any) -> tuple[str, str]:
        response = self.server.client.post("/v1/chat/completions", json={"messages": ASK, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["param"], error["message"]


def message_of(choice: Any) -> tuple[Any, ...]:
    message = choice.message
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    ids = [call.id for call in message.tool_calls or []]
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) >= 9 for call_id in ids)
    return message.role, message.content, (message.model_extra or {}).get("reasoning_content"), calls


def folder_with(path: Path, template: str | list[dict[str, str]]) -> Path:
    """template: a template, or several with their names."""
    encoder = Encoder.from_str(byte_level_json())
    encoder.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *HARMONY)])
    return write_model(path, str(encoder.to_str()), chat_template=template)


@contextlib.contextmanager
def served_with(path: Path, template: str | list[dict[str, str]], grammar_words: int = 0, **options: Any) -> Iterator[Served]:
    """grammar_words: words of the largest accepted grammar; 0: the engine has no grammars."""
    folder = folder_with(path, template)
    facts = FACTS._replace(max_model_len=8192, num_pages=8192)
    if grammar_words:
        facts = facts._replace(grammar_share=2, grammar_words=grammar_words, grammar_arena=4 * grammar_words)
    sizes = replace(SIZES, prompt_tokens=4096 + 6 * grammar_words, hash_entries=1024)
    with (
        FakeEngine(facts=facts, sizes=sizes) as engine,
        serving(engine, folder, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(engine, server, client, Tokenizer(folder))
        server.idle()
