"""What a chat template writes of tools, calls, results and roles, found with conversations in which each has a
separate name. Messages become as the template takes them; what it would leave out is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles
TOOL, CALL, RESULT, PART, LATE = (f"probe_of_a_{what}" for what in ("tool", "call", "result", "part", "late_message"))
SECOND, THOUGHT = "probe_of_a_second_call", "probe_of_a_thought"
CALL_ID = "abcdefghi"
_FUNCTION = {"name": TOOL, "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION | {"description": ""}}]
_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
_CALL = {"id": CALL_ID, "type": "function", "function": {"name": CALL, "arguments": {}}}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID}
_PARTS = [{"type": "text", "text": PART}, {"type": "text", "text": PART}]
_BEFORE: dict[str, list[dict[str, Any]]] = {"assistant": [_QUESTION], "tool": [_QUESTION, _ANSWER]}


class TemplateProbe:
    """takes_tools, takes_calls, takes_results: whether it writes them; a template that refuses a probe may take
    other conversations.
    """

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        silent = self._render([_QUESTION, _ANSWER | {"content": None}, _RESULT]) or ""
        self._no_content = None if CALL in silent and "None" not in silent else ""  # beside calls
        self.takes_tools = self._writes(TOOL, [_QUESTION])
        self.takes_calls = self._no_content is None or self._writes(CALL, [_QUESTION, _ANSWER, _RESULT])
        self.takes_results = self._writes(RESULT, [_QUESTION, _ANSWER, _RESULT])
        self._takes_parts = {role: self._reads_parts(role) for role in ROLES}
        second = _CALL | {"function": {"name": SECOND, "arguments": {}}}
        self._takes_calls_together = self._writes(SECOND, [_QUESTION, _ANSWER | {"tool_calls": [_CALL, second]}, _RESULT])
        self._wants_descriptions = self._render([_QUESTION], [{"type": "function", "function": _FUNCTION}]) is None
        thinking = [_QUESTION, _ANSWER | {"thinking": THOUGHT}, _RESULT]
        self._thinking = THOUGHT in (self._render(thinking) or "")  # it knows reasoning by this name
        thinking[1] = thinking[1] | {"content": "x"}
        self._thinking_alone = self._thinking and self._render(thinking) is None  # or content, beside calls
        late = {"role": "system", "content": LATE}
        self._takes_several = self._writes(LATE, [late | {"content": "x"}, late, _QUESTION])
        self._takes_late = self._writes(LATE, [_QUESTION, {"role": "assistant", "content": "x"}, late, _QUESTION])
        developers = self._render([late | {"role": "developer"}, _QUESTION])
        self._takes_developers = self._render([late, _QUESTION]) is None if developers is None else LATE in developers

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = _TOOLS) -> str | None:
        """What the template makes of a conversation; None if it refuses it."""
        try:
            return "" if self._template is None else self._template.render(messages, tools=tools)
        except ChatError:
            return None

    def _writes(self, name: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template writes what has this name, or refuses the conversation."""
        text = self._render(messages)
        return text is None or name in text

    def _reads_parts(self, role: str) -> bool:
        """Whether the template goes through the parts of such a message, and does not write them as a list."""
        after = [] if role in _BEFORE else [_QUESTION] * (role != "user")
        text = self._render([*_BEFORE.get(role, ()), {"role": role, "content": _PARTS, "tool_call_id": CALL_ID}, *after]) or ""
        return text.count(PART) == len(_PARTS) and "'text'" not in text and '"text"' not in text

    def described(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Tools as the template takes them: with a description, where it insists on one."""
        if not self._wants_descriptions:
            return list(tools)
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation as the template takes it: content in one text unless it reads parts, none beside calls as it likes it;
        one call a message, and one message of instructions, where it writes only the first; a developer's messages as system's
        where it leaves them out, or refuses them alone. Raises ChatError for what it would leave out."""
        fitted = [self._message(message) for message in messages]
        leading = next((i for i, message in enumerate(fitted) if message["role"] not in INSTRUCTIONS), len(fitted))
        if not self._takes_late and any(message["role"] in INSTRUCTIONS for message in fitted[leading:]):
            raise ChatError("this model's chat template accepts system messages only at the beginning")
        if not self._takes_several and leading > 1:
            whole = "\n\n".join(_text(message["content"]) for message in fitted[:leading])
            fitted[:leading] = [fitted[0] | {"content": whole}]
        return fitted if self._takes_calls_together else list(self._one_by_one(fitted))

    def _message(self, given: dict[str, Any]) -> dict[str, Any]:
        content, message = given["content"], dict(given)
        if not self._takes_parts[message["role"]]:
            content = _text(content)
        message["content"] = self._no_content if not content and "tool_calls" in message else content
        if message["role"] == "developer" and not self._takes_developers:
            message["role"] = "system"
        if self._thinking and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
            if self._thinking_alone and message["content"] and "tool_calls" in message:  # it writes either as reasoning
                message["thinking"] += f"\n{_text(content)}"
                message["content"] = self._no_content
        return message

    def _one_by_one(self, messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Messages with several calls as messages with one each, each before its own results."""
        at = 0
        while at < len(messages):
            message, at = messages[at], at + 1
            calls = message.get("tool_calls", ())
            if len(calls) < 2:
                yield message
                continue
            end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            results, at = messages[at:end], end
            known = [call.get("id") for call in calls]
            for result in results:
                if known.count(result["tool_call_id"]) != 1:
                    raise ChatError(f"tool_call_id {result['tool_call_id'][:100]!r} does not match a preceding tool call")
            for call in calls:
                yield message | {"tool_calls": [call]}
                yield from (result for result in results if result["tool_call_id"] == call.get("id"))
                message = {"role": "assistant", "content": self._no_content}


def _text(content: str | list[dict[str, str]] | None) -> str:
    """Content in one text."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
