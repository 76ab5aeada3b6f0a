"""Random requests for /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages. Features are drawn independently, so
any of them combine; values at the edges of their ranges are frequent."""

import json
import random
from typing import Any

from support.front_end.http_model import CHAT, COMPLETIONS, EOS, MESSAGES, RESPONSES, Case, Model, Speech

WORDS = (
    "The king",
    " lived",
    " in a castle",
    " END",
    "END ",
    "the WEEKEND",
    " naïve",
    " 日本語",
    "😀",
    "\n",
    " and",
    " sea.",
    "  ",
    "é",
    "aaab",
)
TENANTS: dict[str, dict[str, Any]] = {
    "fast": {"weight": 2.5, "number": 7, "priorities": [-(2**31), 2**31 - 1]},
    "slow": {"service_tier": "flex", "number": 8, "priorities": [-(2**31), 2**31 - 1]},
    "both": {"weight": 0.25, "number": 9, "service_tiers": ["flex", "priority"], "priorities": [-(2**31), 2**31 - 1]},
}
FLEX = {"slow": 1, "fast": 0, "both": 0}  # class of a request without a tier
FUNCTIONS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "get_time": {"type": "object", "properties": {}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"guided_choice": ["yes", "no, thanks"]}, ["yes", "no, thanks"], ["maybe", "ye", "yes "]),
    ({"guided_regex": "[ab]{2,3}c"}, ["abc", "bbbc"], ["ac", "abbbc", "abcd"]),
    ({"structured_outputs": {"regex": "x+"}}, ["x", "xx"], ["", "xy"]),
    ({"guided_json": SCHEMA}, ['{"a": 1}', '{"a":-2}'], ['{"a": "1"}', "{}", '{"a": 1, "b": 2}']),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, ['{"a": 1}'], ["{}", "1"]),
]
"""Fields of a grammar, texts that it accepts, and texts that it rejects."""
_FORMAT = {"type": "json_schema", "schema": SCHEMA}
MESSAGES_GRAMMARS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"output_format": _FORMAT}, ['{"a": 1}'], ["{}", "1"]),
    ({"output_config": {"format": _FORMAT}}, ['{"a": 1}'], ["{}", "1"]),
]


class CaseMaker:
    """Makes cases from one generator. Seeds, salts and texts are fresh in each case."""

    def __init__(self, seed: int, model: Model):
        self.draw, self.model = random.Random(seed), model
        self.made = 0

    def some(self, share: float) -> bool:
        return self.draw.random() < share

    def text(self, most: int = 8) -> str:
        return "".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(1, most)))

    def case(self) -> Case:
        """The next case."""
        self.made += 1
        path = self.draw.choice([COMPLETIONS, CHAT, RESPONSES, MESSAGES])
        case = self._completion() if path == COMPLETIONS else self._chat(path)
        self._sampling(case)
        self._rules(case)
        self._ends(case)
        self._prediction(case)
        return case

    # ---- prompts

    def _completion(self) -> Case:
        body: dict[str, Any] = {}
        given: list[Any] = []
        for number in range(self.draw.choice([1, 1, 1, 2, 3])):
            text = f"{number}{self.made} {self.text()}"
            ids = self.model.encoder.encode(text, add_special_tokens=False).ids
            given.append(text if self.some(0.6) else ids)
        body["prompt"] = given if len(given) > 1 or self.some(0.3) else given[0]
        if self.some(0.2):
            body["add_special_tokens"] = self.draw.choice([True, False])
        body |= {"n": self.draw.randint(1, 3)} if self.some(0.5) else {}
        if self.some(0.25):
            body["echo"] = True
        elif self.some(0.25):
            body["best_of"] = (body.get("n") or 1) + self.draw.randint(0, 2)
        if self.some(0.4):
            body["logprobs"] = self.draw.choice([0, 1, 3, 20])
        if self.some(0.6 if body.get("echo") and "logprobs" in body else 0.15):
            body["prompt_logprobs"] = self.draw.choice([0, 2, 20])
        prompts = [self.model.prompt_of(one, body) for one in given]
        case = Case(COMPLETIONS, body, self._tenant(), prompts, [], [])
        case.speeches = [[self._speech(self.text(12)) for _ in range(case.choices)] for _ in prompts]
        return case

    def _tenant(self) -> str:
        return self.draw.choice(list(TENANTS))

    def _speech(self, text: str) -> Speech:
        return [*self.model.encoder.encode(text, add_special_tokens=False).ids, EOS]

    def _chat(self, path: str) -> Case:
        body: dict[str, Any] = {}
        text = f"{self.made} {self.text()}"
        messages = [{"role": "user", "content": text}]
        continues = self._conversation(path, body, messages)
        if path == CHAT:
            body |= {"n": self.draw.randint(1, 3)} if self.some(0.4) else {}
            if self.some(0.4):
                body |= {"logprobs": True} | ({"top_logprobs": self.draw.choice([0, 2, 20])} if self.some(0.6) else {})
            if self.some(0.15):
                body["include_reasoning"] = False
        elif path == RESPONSES:
            if self.some(0.3):
                body["instructions"] = self.text()
                messages.insert(0, {"role": "system", "content": body["instructions"]})
            if self.some(0.4):
                body |= {"include": ["message.output_text.logprobs"], "top_logprobs": self.draw.choice([0, 2, 20])}
            if self.some(0.3):
                body["metadata"] = {"a": self.text(2)}
        if self.model.plain:
            prompts = [self.model.chat_prompt(messages, [], {}, continues=continues)]
            case = Case(path, body, self._tenant(), prompts, [], [], plain=True)
            case.speeches = [[self._speech(self.text(12)) for _ in range(case.choices)]]
            body.pop("include_reasoning", None)
            return case
        values = {"enable_thinking": False} if self.some(0.5) else {}
        if path == MESSAGES:
            shown = {"type": self.draw.choice(["enabled", "adaptive"])} | ({"display": "omitted"} if self.some(0.2) else {})
            body |= {"thinking": {"type": "disabled"}} if values else {"thinking": shown} if self.some(0.7) else {}
        else:
            body |= {"chat_template_kwargs": values} if values else {}
        tools, names = [], sorted(FUNCTIONS)[: self.draw.randint(1, 2)]
        if self.some(0.6 if path == MESSAGES else 0.4):
            tools = [self._tool(name) for name in names]
            choice = self.draw.choice(["auto", "none"]) if self.some(0.4) else ""
            parallel = self.draw.choice([True, False]) if self.some(0.5) else None
            if path == MESSAGES:
                body["tools"] = [{"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                                 for tool in (tool["function"] for tool in tools)]  # fmt: skip
                alone = {} if parallel is None or choice == "none" else {"disable_parallel_tool_use": not parallel}
                body |= {"tool_choice": {"type": choice or "auto", **alone}} if choice or alone else {}
            else:
                body["tools"] = tools if path == CHAT else [{"type": "function", **tool["function"]} for tool in tools]
                body |= {} if parallel is None else {"parallel_tool_calls": parallel}
                body |= {"tool_choice": choice} if choice else {}
            tools = [] if choice == "none" else tools
        prompts = [self.model.chat_prompt(messages, tools, values, continues=continues)]
        case = Case(path, body, self._tenant(), prompts, [], [], thinking=not values and not continues)
        if tools and self.some(0.7):
            case.broken = self.some(0.5 if path == MESSAGES else 0.25)
            case.calls = [
                (name, json.dumps({"city": self.text(2)})) for name in self.draw.choices(names, k=self.draw.randint(1, 2))
            ]
        case.speeches = [[self._answer(case) for _ in range(case.choices)]]
        return case

    def _conversation(self, path: str, body: dict[str, Any], messages: list[dict[str, str]]) -> bool:
        """The fields for one question, sometimes after instructions, and before a turn with calls. Returns whether the answer
        continues a text of the model.

        messages: the question's messages; becomes the whole conversation as text."""
        question = messages[0]["content"]
        given: list[dict[str, Any]] = [{"role": "user", "content": question}]
        continues = False
        if self.some(0.4) and not self.model.plain:
            said, count = self.text(3).strip() or "Well.", self.draw.randint(1, 2)
            thoughts, summary = (self._texts() if self.some(0.7) else [] for _ in range(2))
            shown = thoughts or (summary if path == RESPONSES else [])
            calls = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>' * count
            reasoning = "<think>\n{}\n</think>\n\n".format("\n".join(shown)) if shown else ""
            messages.append({"role": "assistant", "content": f"{reasoning}{said}{calls}"})
            ended = path == MESSAGES and self.some(0.3)  # with the calls
            results = [] if ended else [(self._texts(), path == MESSAGES and self.some(0.3)) for _ in range(count)]
            messages += [{"role": "tool", "content": "Error: " * wrong + "\n".join(reported)} for reported, wrong in results]
            thanked = self._texts()
            messages += [] if ended else [{"role": "user", "content": "\n".join(thanked)}]
            given += self._turn(path, said, thoughts, summary, count, results, thanked)
        elif path == MESSAGES and self.some(0.2):
            continues, said = True, self.text(3).strip() or "Well."
            given.append({"role": "assistant", "content": said})
            messages.append({"role": "assistant", "content": said})
        body["input" if path == RESPONSES else "messages"] = question if path == RESPONSES and len(given) == 1 else given
        if path == MESSAGES and self.some(0.3):
            reported = self._texts()
            body["system"] = self._blocks(reported)
            messages.insert(0, {"role": "system", "content": "\n\n".join(reported)})
        return continues

    def _texts(self) -> list[str]:
        return [f"{self.draw.randint(0, 99)}{self.text(3)}x" for _ in range(self.draw.randint(1, 3))]

    def _blocks(self, texts: list[str], kind: str = "text") -> Any:
        """The content of a message: blocks, or sometimes a plain text if it is the only one."""
        return texts[0] if len(texts) == 1 and self.some(0.5) else [{"type": kind, "text": one} for one in texts]

    def _turn(
        self,
        path: str,
        said: str,
        thoughts: list[str],
        summary: list[str],
        count: int,
        results: list[tuple[list[str], bool]],
        thanked: list[str],
    ) -> list[dict[str, Any]]:
        """Messages or items: the model's text and calls, their results, and the user's text. summary: summary of the reasoning,
        used if thoughts are missing.
        """
        ids = [f"id_{i}" for i in range(count)]
        if path == RESPONSES:
            reasons = [{"type": "reasoning_text", "text": one} for one in thoughts]
            summaries = [{"type": "summary_text", "text": one} for one in summary]
            items: list[dict[str, Any]] = [{"type": "reasoning", "summary": summaries, "content": reasons}] * bool(
                thoughts or summary
            )
            items += [{"role": "assistant", "content": self._blocks([said], "output_text")}]
            items += [{"type": "function_call", "call_id": one, "name": "get_time", "arguments": "{}"} for one in ids]
            items += [
                {"type": "function_call_output", "call_id": one, "output": self._blocks(reported, "input_text")}
                for one, (reported, _) in zip(ids, results, strict=True)
            ]
            return [*items, {"role": "user", "content": self._blocks(thanked, "input_text")}]
        if path == CHAT:
            function = {"name": "get_time", "arguments": "{}"}
            calls = [{"id": one, "type": "function", "function": function} for one in ids]
            turn: dict[str, Any] = {"role": "assistant", "content": said, "tool_calls": calls}
            turn |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
            reported = [
                {"role": "tool", "tool_call_id": one, "content": "\n".join(some)}
                for one, (some, _) in zip(ids, results, strict=True)
            ]
            return [turn, *reported, {"role": "user", "content": "\n".join(thanked)}]
        blocks = [{"type": "thinking", "thinking": one, "signature": ""} for one in thoughts]
        uses = [{"type": "tool_use", "id": one, "name": "get_time", "input": {}} for one in ids]
        found: list[dict[str, Any]] = [{"role": "assistant", "content": [*blocks, {"type": "text", "text": said}, *uses]}]
        if results:
            answers = [
                {"type": "tool_result", "tool_use_id": one, "content": self._blocks(some), "is_error": wrong}
                for one, (some, wrong) in zip(ids, results, strict=True)
            ]
            found.append({"role": "user", "content": [*answers, *({"type": "text", "text": one} for one in thanked)]})
        return found

    @staticmethod
    def _tool(name: str) -> dict[str, Any]:
        function = {"name": name, "description": f"says {name}", "parameters": FUNCTIONS[name]}
        return {"type": "function", "function": function}

    def _answer(self, case: Case) -> Speech:
        """Reasoning, content and calls, as the model writes them."""
        encode = self.model.encoder.encode
        thoughts = self.text().strip() or "Hm."
        text = f"{thoughts}\n</think>\n\n" if case.thinking and (case.calls or self.some(0.8)) else ""
        text += f"x{self.text(6)}" if self.some(0.8) or not case.calls else ""
        for name, arguments in case.calls:
            text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if case.broken:
            begin = "<tool_call>" if self.some(0.3) else '"arguments": {'
            text = text[: self.draw.randint(text.rindex(begin) + len(begin), len(text) - len("}\n</tool_call>"))]
        return [*encode(text, add_special_tokens=False).ids, EOS]

    # ---- everything else

    def _sampling(self, case: Case) -> None:
        draw, body = self.draw, case.body
        values = {
            "temperature": [0, 0.25, 2, 100], "top_p": [0.125, 1, 1e-30], "top_k": [-1, 0, 1, 2**31 - 1], "min_p": [0, 0.5, 1],
            "repetition_penalty": [0.5, 1.25, 100], "presence_penalty": [-2, 0.5, 2], "frequency_penalty": [-2, 0.25, 2],
            "seed": [0, 1, -1, 2**63 - 1, -(2**63), draw.randrange(2**40)], "priority": [-(2**31), 2**31 - 1, 5, 0, -3],
            "cache_salt": ["a", "b", " a"], "service_tier": ["auto", "default", "priority", "flex"],
            "request_id": [f"id-{self.made}"], "user": ["somebody"],
        }  # fmt: skip
        if case.path == MESSAGES:
            values = {name: values[name] for name in ("temperature", "top_p", "top_k")}
            values |= {"service_tier": ["auto", "standard_only", "priority", "flex"], "metadata": [{"user_id": "somebody"}]}
            values["top_p"] = [0, *values["top_p"]]
        for name, edges in values.items():
            if self.some(0.25):
                body[name] = draw.choice(edges)
        if self.some(0.5) and not self.model.scores_prompts(case) and case.choices == (body.get("n") or 1):
            body["stream"] = True
            if case.path in (CHAT, COMPLETIONS) and self.some(0.6):
                usage = {"include_usage": self.some(0.7)}
                body["stream_options"] = usage | ({"continuous_usage_stats": True} if self.some(0.4) else {})
        case.hits = [
            0 if self.some(0.3) else draw.randint(0, (len(prompt) - 1) // self.model.page_size) for prompt in case.prompts
        ]

    def _prediction(self, case: Case) -> None:
        """A chat's prediction, sometimes: the text of a choice, possibly edited, or any text. It fits after the prompt."""
        if case.path != CHAT or self.some(0.6):
            return
        said = self.model.text(self.draw.choice(case.speeches[0]), True, chat=False)
        at = self.draw.randrange(len(said) + 1)
        text = self.draw.choice([said, said[:at], said[:at] + self.text(2) + said[at:], self.text(20), ""])
        while len(case.prompts[0]) + len(self.model.encoder.encode(text, add_special_tokens=False).ids) > self.model.context:
            text = text[: len(text) // 2]
        parts = [{"type": "text", "text": part} for part in (text[:at], text[at:])]
        case.body["prediction"] = {"type": "content", "content": parts if self.some(0.3) else text}
        if case.body.get("stream") and self.some(0.7):
            case.body["stream_options"] = {"include_usage": True}

    def _rules(self, case: Case) -> None:
        draw, body = self.draw, case.body
        if case.path == MESSAGES:
            body |= draw.choice(MESSAGES_GRAMMARS)[0] if self.some(0.2) and not case.thinking and not body.get("tools") else {}
            return
        if self.some(0.15):
            body["logit_bias"] = {str(token): draw.choice([-100, 0.5, 100]) for token in draw.sample(range(3, 400), 3)}
        if self.some(0.1):
            body["allowed_token_ids"] = draw.sample(range(3, 400), 5)
        if self.some(0.1):
            body["bad_words"] = draw.sample(["king", " castle", "and", " the", "of", "a"], 3)
        closed = not case.thinking and not case.body.get("tools")
        if self.some(0.2) and (case.path == COMPLETIONS or (case.path == CHAT and closed)):
            body |= draw.choice(GRAMMARS)[0]

    def _ends(self, case: Case) -> None:
        """Stop strings, stop ids and limits: they may cut a text anywhere, but no call."""
        draw, body = self.draw, case.body
        space = min(self.model.context - len(prompt) for prompt in case.prompts)
        body |= {"max_tokens": space} if case.path == MESSAGES else {}
        spoken = [speech for speeches in case.speeches for speech in speeches]
        longest = max(map(len, spoken))
        if case.calls:
            body |= {case.limit_field: max(1, draw.choice([space, longest - 1, longest - 20]))} if self.some(0.3) else {}
            if self.some(0.3):
                stop = draw.choice(["city", '"}', "</tool_call>", "END", "arg"])
                body |= {"stop_sequences": [stop]} if case.path == MESSAGES else {"stop": stop}
            return
        if self.some(0.6):
            body[case.limit_field] = draw.choice([1, 2, longest - 1 or 1, longest, longest + 1, min(space, 40), space])
        if body.get("echo") and self.some(0.3):
            body["max_tokens"] = 0
        if self.some(0.2) and 0 < body.get(case.limit_field, 0) <= 60 and case.path != MESSAGES:
            body["ignore_eos"] = True
        limit = max(1, space if body.get(case.limit_field) is None else body[case.limit_field])
        if self.some(0.3) and case.path != MESSAGES:
            body["min_tokens"] = min(limit, draw.choice([0, 1, 3, longest, draw.randint(0, longest)]))
        if self.some(0.4):
            texts = [self.model.text(speech[:-1], True, case.chat) for speech in spoken]
            parts = [text[at : at + draw.randint(1, 5)] for text in texts for at in [draw.randrange(max(1, len(text)))]]
            stops = [part for part in (*parts, " END", "END ", "never", "aab") if part and "\x00" not in part]
            chosen = draw.sample(stops, min(len(stops), draw.randint(1, 3)))
            chosen += [chosen[0][1:]] if len(chosen[0]) > 1 and self.some(0.3) else []
            name = "stop_sequences" if case.path == MESSAGES else "stop"
            body[name] = chosen if len(chosen) > 1 or case.path == MESSAGES or self.some(0.5) else chosen[0]
        if case.path == MESSAGES:
            return
        if self.some(0.2):
            body["stop_token_ids"] = draw.sample([token for token in spoken[0] if token != EOS] or [5], 1)
        for name, value in (("include_stop_str_in_output", True), ("skip_special_tokens", False)):
            if self.some(0.2):
                body[name] = value
