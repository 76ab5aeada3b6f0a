"""Converts conversations to a form that a chat template accepts.

Some templates raise an error for two calls in a message, for a second system message, or for two consecutive messages of a user.
Others omit such messages. The probe renders small conversations once, when the server starts. After that, each conversation that
the template would refuse, or of which it would omit a part, is changed to an equivalent form.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.conversation_forms import (
    EMPTY,
    INSTRUCTIONS,
    Fitted,
    Message,
    apart_from_turns,
    as_object,
    as_one,
    as_turns,
    folded,
    joined,
    named_results,
    ordered_results,
    short_ids,
    text_of,
    with_every_result,
    without_silence,
    written,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL, CALL, RESULT, PART, LATE = (f"probe_of_a_{what}" for what in ("tool", "call", "result", "part", "late_message"))
SECOND, THOUGHT = "probe_of_a_second_call", "probe_of_a_thought"
LONG_IDS = ("call_0123456789abcdef01234567", "call_123456789abcdef012345678")
SHORT_IDS = ("abcdefghi", "jklmnopqr")
_FUNCTION = {"name": TOOL, "parameters": {"type": "object", "properties": {}}}
_DEFAULTS: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _FUNCTION | {"description": ""}}]
_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
_LATE: dict[str, Any] = {"role": "user", "content": LATE}
_PARTS = [{"type": "text", "text": PART}, {"type": "text", "text": PART}]


class _CallForm(NamedTuple):
    """A form of calls. content: add an empty content next to calls. as_objects: arguments are objects, otherwise JSON text. ids:
    the ids of two calls.
    """

    content: str | None
    as_objects: bool
    ids: tuple[str, str]


_CALL_FORMS = tuple(
    _CallForm(content, as_objects, ids) for as_objects in (True, False) for ids in (LONG_IDS, SHORT_IDS) for content in (None, "")
)


class TemplateProbe:
    """The forms of conversations that a template accepts. takes_tools: whether it writes tools, or refuses the probe.
    takes_calls,
    takes_results: whether it writes them in some form, perhaps as text."""

    def __init__(self, template: ChatTemplate | None):
        self._template, self._names_results = template, False
        self._in_parts: set[str] = set()  # roles whose content the template takes only as a list of parts
        self._fill_parts("user", [])
        text = self._render([_QUESTION])
        self.takes_tools = text is None or TOOL in text
        self._defaults = [name for name in _DEFAULTS if self._render([_QUESTION], _tools_without(name)) is None]
        self._fill_parts("system", [_QUESTION])
        self._fill_parts("assistant", [_QUESTION])
        self._probe_calls()
        self._takes_parts = {role: self._reads_parts(role) for role in ROLES}
        self._probe_reasoning()
        self._probe_instructions()
        said = {"role": "assistant", "content": "x"}
        self._fills = {role for role in ("user", "tool", "assistant") if self._refuses_empty(role)}
        self._joins_users = not self._writes([_QUESTION, _LATE])
        self._joins_assistants = not self._writes([_QUESTION, said, said | {"content": LATE}, _QUESTION])
        opened = [said, _LATE]
        self._opens_with_user = not self._writes(opened) and self._writes([_QUESTION, *opened])
        asked = [*self._called(CALL), _LATE]
        silent = {"role": "assistant", "content": EMPTY if "assistant" in self._fills else ""}
        self._answers_results = not self._writes(asked) and self._writes([*asked[:-1], silent, _LATE])
        self._wants_results |= self._answers_results and self._render([*asked[:2], _LATE]) is None

    # ---- probes

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = _TOOLS) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        shown = [self._with_parts(message) for message in messages]
        try:
            return "" if self._template is None else self._template.render(shown, tools=tools)
        except ChatError:
            return None

    def _writes(self, messages: Sequence[Mapping[str, Any]], *names: str) -> bool:
        """Whether the template writes texts of a conversation."""
        text = self._render(messages)
        return text is not None and all(name in text for name in names or (LATE,))

    def _fill_parts(self, role: str, others: list[Message]) -> None:
        """From now on, pass the contents of a role as parts, if the template accepts nothing else."""
        before, after = (others, [_QUESTION]) if role == "assistant" else ([], others)
        text = [*before, _LATE | {"role": role}, *after]
        if not self._writes(text):
            self._in_parts.add(role)
            if not self._writes(text):
                self._in_parts.discard(role)

    def _with_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] not in self._in_parts or not isinstance(message["content"], str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _refuses_empty(self, role: str) -> bool:
        """Whether the template refuses an empty content of a role, but accepts a non-empty content."""
        called = self._called(CALL)
        before = {"tool": called[:2], "assistant": [_QUESTION]}.get(role, [])
        message = called[2] if role == "tool" else {"role": role, "content": "x"}
        after = [_QUESTION] * (role == "assistant")
        return self._render([*before, message | {"content": ""}, *after]) is None and self._writes(
            [*before, message, *after], "x"
        )

    def _called(self, *names: str, form: _CallForm | None = None, arguments: Any = None) -> list[Message]:
        """A conversation with calls of these names, each with a result."""
        form = form or self._form or _CALL_FORMS[0]
        given = ({} if form.as_objects else "{}") if arguments is None else arguments
        pairs = list(zip(form.ids, names, strict=False))
        calls = [{"id": one, "type": "function", "function": {"name": name, "arguments": given}} for one, name in pairs]
        results = [{"role": "tool", "content": RESULT, "tool_call_id": one} for one, _ in pairs]
        if self._names_results:
            results = [result | {"name": name} for result, (_, name) in zip(results, pairs, strict=True)]
        return [_QUESTION, {"role": "assistant", "content": form.content, "tool_calls": calls}, *results]

    def _probe_calls(self) -> None:
        self._form: _CallForm | None = None
        for self._names_results, form in product((False, True), _CALL_FORMS):
            text = self._render(self._called(CALL, form=form))
            if text is not None and CALL in text and (form.content is not None or "None" not in text):
                self._form = form
                break
        else:  # a template may write calls, but not the results
            self._names_results = False
            self._form = next((form for form in _CALL_FORMS if self._writes(self._called(CALL, form=form)[:2], CALL)), None)
        self._writes_results = self._form is not None and self._writes(self._called(CALL), RESULT)
        as_text = [_QUESTION, {"role": "assistant", "content": CALL}, _LATE]
        writes_text = self._render(as_text) is None or self._writes(as_text, CALL, LATE)
        self.takes_calls, self.takes_results = self._form is not None or writes_text, self._writes_results or writes_text
        two = self._called(CALL, SECOND)
        self._takes_calls_together = self._writes(two, CALL, SECOND)
        said, one, other = {"role": "assistant", "content": "x"}, self._called(CALL), two[1]
        later = [said, _QUESTION, other | {"tool_calls": two[1]["tool_calls"][1:]}, two[3], said, _LATE]
        self._wants_results = self._writes([*one, *later], CALL) and self._render([*one[:2], *later]) is None
        if self._takes_calls_together:
            lacking = [*two[:3], _LATE], [*two[:2], two[3], _LATE]
            self._wants_results |= any(self._render(some) is None for some in lacking)
        self._orders_results = self._takes_calls_together and not self._writes([*two[:2], two[3], two[2]], CALL, SECOND)
        combined = self._called(CALL)
        combined[1] = combined[1] | {"content": "x"}
        self._calls_alone = self._form is not None and not self._writes(combined, CALL)  # no calls next to content
        self._objects_alone = (
            self._form is not None and self._form.as_objects and self._render(self._called(CALL, arguments='{"x": ')) is None
        )

    def _reads_parts(self, role: str) -> bool:
        """Whether the template iterates over the parts of such a message, instead of printing the list."""
        before = {"assistant": [_QUESTION], "tool": self._called(CALL)[:2]}.get(role, [])
        after = [] if before else [_QUESTION] * (role != "user")
        message = {"role": role, "content": _PARTS, "tool_call_id": (self._form or _CALL_FORMS[0]).ids[0]}
        text = self._render([*before, message, *after]) or ""
        return text.count(PART) == len(_PARTS) and "'text'" not in text and '"text"' not in text

    def _probe_reasoning(self) -> None:
        thinking = self._called(CALL)
        thinking[1] = thinking[1] | {"thinking": THOUGHT}
        self._thinking = THOUGHT in (self._render(thinking) or "")  # the template knows reasoning by this name
        thinking[1] = thinking[1] | {"content": "x"}
        self._thinking_alone = self._thinking and self._render(thinking) is None  # or content, next to calls

    def _probe_instructions(self) -> None:
        system, developer = ({"role": role, "content": LATE} for role in INSTRUCTIONS)
        self._takes_system = self._writes([system, _QUESTION])
        self._takes_developers = self._writes([developer, _QUESTION])
        self._system_alone = self._writes([system])
        self._folds = self._writes([_LATE])  # it writes messages of a user
        kinds = [kind for kind, taken in ((system, self._takes_system), (developer, self._takes_developers)) if taken]
        pairs = [(one | {"content": "x"}, other) for one in kinds for other in kinds]
        self._takes_several = all(
            self._writes([*pair, _QUESTION]) and self._writes([pair[1], pair[0], _QUESTION]) for pair in pairs
        )
        said = {"role": "assistant", "content": "x"}
        self._takes_late = bool(kinds) and all(self._writes([_QUESTION, said, kind, _QUESTION]) for kind in kinds)

    # ---- tools and conversations

    def described(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Tools in the form that the template accepts: with empty fields if it requires them."""
        if not self._defaults:
            return list(tools)
        found: list[Mapping[str, Any]] = []
        for tool in tools:
            function = {**{name: _DEFAULTS[name] for name in self._defaults}, **tool["function"]}
            if "parameters" in self._defaults:
                function["parameters"] = {**_DEFAULTS["parameters"], **function["parameters"]}
            found.append({**tool, "function": function})
        return found

    def fitted(self, messages: Sequence[Message]) -> list[Fitted]:
        """A conversation in a form that the template accepts; unchanged if the template accepts all forms. Raises ChatError for
        results without a call if each call needs a separate message.
        """
        found = [Fitted(i, self._message(message)) for i, message in enumerate(messages)]
        if "assistant" in self._fills:
            found = without_silence(found)
        found = list(self._with_results(self._instructed(found)))
        if self._wants_results:
            found = list(with_every_result(found))
        if self._names_results:
            found = named_results(found)
        if self._orders_results:
            found = ordered_results(found)
        if self._calls_alone:
            found = list(self._apart(found))
        if not self._takes_calls_together:
            found = list(self._one_by_one(found))
        if self._form is not None and self._form.ids == SHORT_IDS:
            found = short_ids(found)
        fitted = list(self._in_turns(found))
        if self._fills or self._in_parts:
            fitted = [Fitted(one.source, dict(self._with_parts(self._filled(one.message)))) for one in fitted]
        return fitted

    def plain_forms(self, fitted: Sequence[Fitted]) -> Iterator[list[Fitted]]:
        """Fallback forms for a conversation that the template still refuses: alternating turns of text, then one message."""
        for form in (as_turns(fitted), as_one(fitted)):
            yield [Fitted(one.source, dict(self._with_parts(one.message))) for one in form]

    def _filled(self, message: Message) -> Message:
        fills = message["role"] in self._fills and not message["content"] and "tool_calls" not in message
        return message | {"content": EMPTY} if fills else message

    def refused_at(self, fitted: Sequence[Fitted], tools: Sequence[Mapping[str, Any]] | None) -> tuple[int, str]:
        """For a conversation that the template refuses: the index of the message at fault, and its field."""
        taken, refused = 0, len(fitted)
        while refused - taken > 1:  # the shortest beginning that is refused
            middle = (taken + refused) // 2
            if self._render([one.message for one in fitted[:middle]], tools or ()) is None:
                refused = middle
            else:
                taken = middle
        index, message = fitted[refused - 1]
        before = [one.message for one in fitted[: refused - 1]]
        if "tool_calls" not in message:
            if self._render([*before, message | {"content": "x"}], tools or ()) is not None:
                return index, "content"
            return index, "tool_call_id" if message["role"] == "tool" else "role"
        without = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "x"}
        return index, "role" if self._render([*before, without], tools or ()) is None else "tool_calls"

    def _message(self, given: Message) -> Message:
        content, message = given["content"], dict(given)
        if not self._takes_parts[message["role"]]:
            content = text_of(content)
        if "tool_calls" in message:
            content = self._with_calls(message, content)
        message["content"] = content
        if message["role"] == "developer" and not self._takes_developers:
            message["role"] = "system"
        elif message["role"] == "system" and not self._takes_system and self._takes_developers:
            message["role"] = "developer"
        if self._thinking and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
            if self._thinking_alone and content and "tool_calls" in message:  # the template writes either as reasoning
                message["thinking"] += f"\n{text_of(content)}"
                message["content"] = self._no_content
        return message

    @property
    def _no_content(self) -> str | None:
        return "" if self._form is None else self._form.content

    def _with_calls(self, message: Message, content: Any) -> Any:
        """A message with calls: its content, and its calls with arguments in the template's form. Without such a form, calls
        become text.
        """
        if self._form is None:
            calls = (written(call["function"]) for call in message.pop("tool_calls"))
            return "\n".join(filter(None, (text_of(content), *calls)))
        message["tool_calls"] = [{**call, "function": self._function(call["function"])} for call in message["tool_calls"]]
        return content or self._form.content

    def _function(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            as_objects = self._form is None or self._form.as_objects
            return function if as_objects else {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {**function, "arguments": as_object(arguments)} if self._objects_alone else function

    # ---- instructions

    def _instructed(self, messages: list[Fitted]) -> list[Fitted]:
        """Instructions merged into one message at the beginning, or into a user's message, as far as the template requires it."""
        leading = next((i for i, one in enumerate(messages) if one.message["role"] not in INSTRUCTIONS), len(messages))
        first, later = messages[:leading], messages[leading:]
        if leading > 1 and not self._takes_several:
            whole = "\n\n".join(text_of(one.message["content"]) for one in first)
            first = [Fitted(first[0].source, first[0].message | {"content": whole})]
        if not self._folds:
            return first + later
        if not self._takes_system and not self._takes_developers:
            return folded(first + later)
        if first and not later and not self._system_alone:  # the template writes instructions with the next message
            return [*first, Fitted(first[-1].source, {"role": "user", "content": ""})]
        if not self._takes_late:
            return first + folded(later)
        return first + (apart_from_turns(later) if self._joins_users or self._answers_results else later)

    # ---- calls and results

    def _with_results(self, messages: Sequence[Fitted]) -> Iterator[Fitted]:
        """Results as texts of a user, if the template does not write results."""
        for one in messages:
            if one.message["role"] == "tool" and not self._writes_results:
                text = f"<tool_response>\n{text_of(one.message['content'])}\n</tool_response>"
                yield Fitted(one.source, {"role": "user", "content": text})
            else:
                yield one

    def _apart(self, messages: Sequence[Fitted]) -> Iterator[Fitted]:
        """Content and calls in separate messages. If the template refuses consecutive messages of an assistant, the content is
        omitted.
        """
        for index, message in messages:
            if "tool_calls" in message and message["content"]:
                if not self._joins_assistants:
                    yield Fitted(index, {key: value for key, value in message.items() if key != "tool_calls"})
                message = {"role": "assistant", "content": self._no_content, "tool_calls": message["tool_calls"]}
            yield Fitted(index, message)

    def _one_by_one(self, messages: Sequence[Fitted]) -> Iterator[Fitted]:
        """Split messages with several calls into messages with one call each, followed by its results."""
        at = 0
        while at < len(messages):
            (index, message), at = messages[at], at + 1
            calls = message.get("tool_calls", ())
            if len(calls) < 2:
                yield Fitted(index, message)
                continue
            end = next((i for i in range(at, len(messages)) if messages[i].message["role"] != "tool"), len(messages))
            results, at = messages[at:end], end
            known = [call.get("id") for call in calls]
            for result in results:
                name = result.message["tool_call_id"]
                if known.count(name) != 1:
                    where = f"messages[{result.source}].tool_call_id"
                    raise ChatError(f"'{where}' must be the id of a call in the previous message, not {name[:100]!r}.")
            for call in calls:
                yield Fitted(index, message | {"tool_calls": [call]})
                yield from (one for one in results if one.message["tool_call_id"] == call.get("id"))
                message = {"role": "assistant", "content": self._no_content}

    # ---- turns

    def _in_turns(self, messages: Sequence[Fitted]) -> Iterator[Fitted]:
        """Turns in the template's order: consecutive messages of one role become one message."""
        last: Fitted | None = None
        opened = False  # a message other than instructions has come
        for one in messages:
            role = one.message["role"]
            begins = last is None or (last.message["role"] in INSTRUCTIONS and not opened)
            opened = opened or role not in INSTRUCTIONS
            if begins and role == "assistant" and self._opens_with_user:
                if last is not None:
                    yield last
                    last = None
                yield Fitted(one.source, {"role": "user", "content": ""})
            if last is not None:
                before = last.message["role"]
                joins = self._joins_users if role == "user" else role == "assistant" and self._joins_assistants
                if joins and before == role and "tool_calls" not in last.message:
                    last = Fitted(last.source, joined(last.message, one.message))
                    continue
                yield last
                if before == "tool" and role == "user" and self._answers_results:
                    yield Fitted(one.source, {"role": "assistant", "content": ""})
            last = one
        if last is not None:
            yield last


def _tools_without(name: str) -> list[dict[str, Any]]:
    """The probe's tool without a field."""
    function = {key: value for key, value in _TOOLS[0]["function"].items() if key != name}
    return [{"type": "function", "function": function}]
