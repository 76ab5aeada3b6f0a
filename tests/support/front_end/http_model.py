"""The effects of an HTTP request: a short model of the API, derived from docs/api.md, not from the product's code.

It computes submissions, texts, finish reasons and counts from a body and the engine's tokens of each choice. It decodes text with
the `tokenizers` library, and uses no module of blinkpy.dpu.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Encoder

EOS = 1
SHOWN = ("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")  # special tokens that chat parsers read
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PLAIN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant:"
DEFAULTS = {"temperature": 0.6, "top_p": 0.9}  # of the model's generation_config.json
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
Speech = list[int]  # token ids that the engine generates for one choice, repeated as needed


def logprob_of(token: int) -> float:
    """The log probability of each generated token in these tests; exact in float32."""
    return -0.125 * (1 + token % 11)


def is_own_draft(token: int) -> bool:
    """Whether a token outside every prediction counts as a draft in these tests."""
    return token % 3 == 0


@dataclass
class Case:
    """A request. tenant: owner of its key. prompts: token ids. speeches: tokens of each choice of each prompt. hits: pages of
    each prompt in the prefix cache."""

    path: str
    body: dict[str, Any]
    tenant: str
    prompts: list[list[int]]
    speeches: list[list[Speech]]
    hits: list[int]
    thinking: bool = False  # the prompt opens the reasoning
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments in each speech
    plain: bool = False  # chats have only content
    broken: bool = False  # each speech ends inside its last call

    @property
    def chat(self) -> bool:
        return self.path != COMPLETIONS

    @property
    def choices(self) -> int:
        """Number of choices for each prompt."""
        return int(self.body.get("best_of") or self.body.get("n") or 1)

    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens that the answer shows for each token; None: no log probabilities."""
        body = self.body
        if self.path == COMPLETIONS:
            return None if body.get("logprobs") is None else int(body["logprobs"])
        asked = body.get("logprobs") if self.path == CHAT else "message.output_text.logprobs" in body.get("include", ())
        return int(body.get("top_logprobs") or 0) if asked else None

    @property
    def limit_field(self) -> str:
        return "max_output_tokens" if self.path == RESPONSES else "max_tokens"

    @property
    def stops(self) -> list[str]:
        given = self.body.get("stop_sequences" if self.path == MESSAGES else "stop") or []
        return [given] if isinstance(given, str) else list(given)

    @property
    def hides_reasoning(self) -> bool:
        if self.path == MESSAGES:
            thinking = self.body.get("thinking") or {"type": "disabled"}
            return thinking["type"] == "disabled" or thinking.get("display") == "omitted"
        return self.body.get("include_reasoning") is False

    @property
    def parallel(self) -> bool:
        """Whether the answer may have several calls."""
        if self.path == MESSAGES:
            return not (self.body.get("tool_choice") or {}).get("disable_parallel_tool_use")
        return self.body.get("parallel_tool_calls") is not False


@dataclass
class ExpectedChoice:
    """One choice. tokens: tokens that count; texts: the text before each token, and after the last."""

    tokens: list[int]
    text: str
    finish: str
    texts: list[str]
    pushed: list[int]  # tokens with text
    met: str = ""  # the stop string that ended it


class Model:
    """The model of the API for a tokenizer and the engine's limits. context, page_size: in tokens. plain: the template is PLAIN,
    otherwise THINKING."""

    def __init__(self, encoder: Encoder, context: int, page_size: int, plain: bool = False):
        self.encoder, self.context, self.page_size, self.plain = encoder, context, page_size, plain
        special = encoder.get_added_tokens_decoder()
        self.special = {token for token, added in special.items() if added.special}
        self.shown = set() if plain else {encoder.token_to_id(name) for name in SHOWN}

    # ---- texts

    def text(self, tokens: list[int], skip: bool, chat: bool) -> str:
        """The text of tokens, without an incomplete last character."""
        hidden = self.special - (self.shown if chat else set()) if skip else set()
        kept = [token for token in tokens if token not in hidden]
        return str(self.encoder.decode(kept, skip_special_tokens=False)).rstrip("\ufffd")

    def limit(self, case: Case, prompt: list[int]) -> int:
        given = case.body.get(case.limit_field)
        return self.context - len(prompt) if given is None else max(1, int(given))

    def stop_ids(self, case: Case) -> set[int]:
        own = set(case.body.get("stop_token_ids") or ())
        return own if case.body.get("ignore_eos") else own | {EOS}

    def expected_choice(self, case: Case, prompt: list[int], speech: Speech) -> ExpectedChoice:
        """A choice up to a stop id, a stop string or the limit, whichever comes first."""
        body, minimum = case.body, int(case.body.get("min_tokens") or 0)
        skip, include = body.get("skip_special_tokens") is not False, bool(body.get("include_stop_str_in_output"))
        tokens: list[int] = []
        pushed: list[int] = []
        texts = [""]
        while True:
            token = speech[len(tokens) % len(speech)]
            tokens.append(token)
            ends = token in self.stop_ids(case) and len(tokens) > minimum
            if not ends or include:
                pushed.append(token)
            before, text = texts[-1], self.text(pushed, skip, case.chat)
            texts.append(text)
            for end in range(len(before) + 1, len(text) + 1) if len(tokens) > minimum else ():
                met = [stop for stop in case.stops if text[:end].endswith(stop)]
                if met:
                    longest = max(met, key=len)
                    return ExpectedChoice(tokens, text[: end if include else end - len(longest)], "stop", texts, pushed, longest)
            if ends:
                return ExpectedChoice(tokens, text, "stop", texts, pushed)
            if len(tokens) == self.limit(case, prompt):
                return ExpectedChoice(tokens, text, "length", texts, pushed)

    def reasoning_tokens(self, case: Case, said: ExpectedChoice) -> int:
        """Tokens up to the closing tag, which counts."""
        closing = self.encoder.token_to_id("</think>")
        if not case.thinking:
            return 0
        return said.pushed.index(closing) + 1 if closing in said.pushed else len(said.pushed)

    def prediction(self, case: Case) -> list[int] | None:
        """The tokens of a chat's prediction."""
        if "prediction" not in case.body:
            return None
        given = case.body["prediction"]["content"]
        text = given if isinstance(given, str) else "".join(part["text"] for part in given)
        return list(self.encoder.encode(text, add_special_tokens=False).ids)

    def drafts(self, case: Case, said: ExpectedChoice, limit: int) -> tuple[int, int]:
        """The accepted drafts of a choice, and those from its prediction. limit: its max_tokens."""
        minimum, found = int(case.body.get("min_tokens") or 0), [0, 0]
        for number, token in enumerate(said.tokens, 1):
            if number < limit and not (number > minimum and token in self.stop_ids(case)):
                from_it = (self.prediction(case) or [])[number - 1 : number] == [token]
                found[1] += from_it
                found[0] += from_it or is_own_draft(token)
        return found[0], found[1]

    # ---- what the engine gets

    def entry(self, case: Case, prompt: list[int], choice: int) -> dict[str, Any]:
        """Fields of the submission that follow from the body. An absent field may have any value."""
        body = case.body
        wanted: dict[str, Any] = {"max_tokens": self.limit(case, prompt)}
        for name, neutral in NEUTRAL.items():
            given = body.get(name)
            wanted[name] = DEFAULTS.get(name, neutral) if given is None else given
        wanted["top_k"] = max(0, wanted["top_k"])
        wanted["top_p"] = wanted["top_p"] or 1.0  # 0 is off in Anthropic's API, and refused elsewhere
        if body.get("seed") is not None:
            wanted["seed"] = (int(body["seed"]) + choice + 2**63) % 2**64 - 2**63
        wanted["priority"] = int(body.get("priority") or 0)
        scored = choice == 0 and self.scores_prompts(case) and len(prompt) > 1
        logprobs = -1 if case.logprobs is None else case.logprobs
        compared = body.get("best_of") is not None and body["best_of"] > (body.get("n") or 1)
        wanted["logprobs"] = max(0, logprobs) if scored or compared else logprobs
        wanted["flags"] = 2 if scored else 0
        return {k: float(np.float32(v)) if isinstance(NEUTRAL.get(k), float) else v for k, v in wanted.items()}

    @staticmethod
    def scores_prompts(case: Case) -> bool:
        body = case.body
        return body.get("prompt_logprobs") is not None or bool(body.get("echo") and case.logprobs is not None)

    # ---- prompts

    def prompt_of(self, given: str | list[int], body: dict[str, Any]) -> list[int]:
        """The prompt of a request to /v1/completions."""
        if not isinstance(given, str):
            return list(given)
        return list(self.encoder.encode(given, add_special_tokens=body.get("add_special_tokens") is not False).ids)

    def chat_prompt(
        self, messages: list[dict[str, str]], tools: list[dict[str, Any]], values: dict[str, Any], *, continues: bool
    ) -> list[int]:
        """The prompt of a chat by the template. messages: with calls as text, and results with the role `tool`. tools: in the
        form of chats. continues: the answer continues the last text."""
        texts = [
            ("user", f"<tool_response>{m['content']}</tool_response>") if m["role"] == "tool" else (m["role"], m["content"])
            for m in messages
        ]
        said = "".join(f"<|start|>{role}\n{text}<|end|>\n" for role, text in texts)
        end = "" if continues else "<|start|>assistant:" if self.plain else "<|start|>assistant\n<think>\n"
        said = said.removesuffix("<|end|>\n") if continues else said
        if self.plain:
            return list(self.encoder.encode(f"{said}{end}", add_special_tokens=False).ids)
        text = ""
        if tools:
            lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
            text = f"<|start|>system\nTools:\n{lines}Answer with <tool_call>{{...}}</tool_call>.<|end|>\n"
        text += f"{said}{end}"
        text += "\n</think>\n\n" if values.get("enable_thinking") is False and not continues else ""
        return list(self.encoder.encode(text, add_special_tokens=False).ids)
