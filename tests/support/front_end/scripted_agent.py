"""A server whose model follows a script in the conversation, for clients that need calls. `python -m` this module prints its URL.

A user's message is the script; each result of a call leads to the next line:

    CALL NAME {"argument": "value"}   the model calls a tool that it was given
    WRITE TEXT                        it writes the rest of the line
    THINK TEXT                        it reasons, before the next line

At the end of the script, the model repeats the last result of a call.
"""

import argparse
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from support.front_end import chat_templates
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine, Request
from support.front_end.tiny_tokenizer import byte_level_json, write_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy.config import Config
from blinkpy.dpu.supervisor import listen
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.dpu.worker import make_server

EOS = 1
CONTEXT = 1 << 19  # tokens: agents' prompts have some 100,000 bytes, and as many tokens of the small tokenizer
# Grammars are accepted but have no effect on answers: scripts must fit them.
FACTS_OF_AGENTS = {
    "max_model_len": CONTEXT,
    "num_pages": CONTEXT,
    "page_size": 16,
    "grammar_share": 2,
    "grammar_words": 1 << 16,
    "grammar_arena": 1 << 17,
}
MOST_RESULT = 400  # maximum characters of a repeated result
LINE = re.compile(r"^\s*(CALL|WRITE|THINK) (.*)$", re.MULTILINE)
RESULT = re.compile(r"^user\n<tool_response>(.*?)</tool_response>", re.DOTALL)


def steps_of(text: str) -> list[str]:
    """The model's answers in order, by the script in a user's message."""
    found, thoughts = [], ""
    for kind, rest in LINE.findall(text):
        if kind == "THINK":
            thoughts += f"<think>\n{rest}\n</think>\n\n"
            continue
        said = rest
        if kind == "CALL":
            name, _, arguments = rest.partition(" ")
            given, _ = json.JSONDecoder().raw_decode(arguments)
            said = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}\n</tool_call>'
        found.append(thoughts + said)
        thoughts = ""
    return found


def answer_to(prompt: str) -> str:
    """The model's answer to a prompt of the template THINKING_BY_ITSELF."""
    parts = [part.removesuffix("\n").removesuffix("<|end|>") for part in prompt.split("<|start|>")[1:]]
    reported = max((i for i, part in enumerate(parts) if part.startswith("user\n") and LINE.search(part)), default=None)
    if reported is None:
        return "Nothing to do."
    results = [found[1] for part in parts[reported + 1 :] if (found := RESULT.match(part))]
    steps = steps_of(parts[reported])
    if len(results) >= len(steps):
        return f"The tool said: {results[-1].strip()[:MOST_RESULT]}" if results else "Done."
    step, begun = steps[len(results)], parts[-1].removeprefix("assistant\n")
    called = re.search(r'<tool_call>\n\{"name": "([^"]+)"', step)
    if called and f'"name": "{called[1]}"' not in parts[0]:
        return f"There is no tool {called[1]}."
    return step[len(begun) :] if begun and step.startswith(begun) else step


class ScriptedEngine(FakeEngine):
    """An engine that answers prompts as answer_to does."""

    def __init__(self, tokenizer: Tokenizer):
        sizes = replace(SIZES, prompt_tokens=4 * CONTEXT, hash_entries=CONTEXT)
        super().__init__(sizes=sizes, facts=FACTS._replace(**FACTS_OF_AGENTS))
        self.tokenizer = tokenizer
        self._answers: dict[int, list[int]] = {}  # by the request's id

    def says(self, request: Request) -> int:
        key = int(request.entry["request_id"])
        if request.made == 0:
            prompt = str(self.tokenizer.encoder.decode(request.prompt, skip_special_tokens=False))
            text = answer_to(prompt)
            self._answers[key] = [*self.tokenizer.encode(text, add_special_tokens=False, parse_special=True).tolist(), EOS]
        return self._answers[key][min(request.made, len(self._answers[key]) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--key", default="")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        encoder = Encoder.from_str(byte_level_json())
        encoder.add_special_tokens([AddedToken(name, special=True) for name in ("<think>", "</think>")])
        path = write_model(Path(folder), str(encoder.to_str()), chat_template=chat_templates.THINKING_BY_ITSELF)
        with ScriptedEngine(Tokenizer(path)) as engine:
            values = {"name": engine.segment_name, "served_model_name": "scripted", "shutdown_s": 1, "api_key": arguments.key}
            config = Config().with_options(
                {**values, "grammar_compile_ms": 5000, "engine_timeout_ms": 60_000, "log_level": "info"}
            )
            (sock,) = listen("127.0.0.1", arguments.port, 1)
            print(f"blinkpy serves scripted on http://127.0.0.1:{sock.getsockname()[1]} ", flush=True)
            make_server(config, 0, path).run(sockets=[sock])


if __name__ == "__main__":
    main()
