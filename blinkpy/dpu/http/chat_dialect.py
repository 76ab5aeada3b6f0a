"""What a model's chat template takes, and how the model writes reasoning and tool calls: from a chat to the prompt's text."""

from collections.abc import Mapping, Sequence
from typing import Any

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.grammar_fields import GrammarField
from blinkpy.dpu.http.fields.request_fields import ROLES, Request
from blinkpy.dpu.http.fields.tool_fields import NO_PARAMETERS, Tool
from blinkpy.dpu.text.chat_prompt import chat_text
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.special_tokens import SpecialTokens
from blinkpy.dpu.tools.call_format import choose_format
from blinkpy.dpu.tools.call_grammar import after_reasoning, forced_calls, held_calls
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.dpu.tools.reasoning import choose_tags

FORMATS = ("response_format", "text.format")  # fields about content, of which an answer with a call that must come has none
# A conversation that shows what a template writes of tools, calls and results: each has a name of its own.
TOOL, CALL, RESULT = "probe_of_a_tool", "probe_of_a_call", "probe_of_a_result"
PROBE_TOOLS = [{"type": "function", "function": {"name": TOOL, "description": "", "parameters": NO_PARAMETERS}}]
PROBE_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
PROBE_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": CALL, "arguments": {}}}
PROBE_ANSWER = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
PROBE_RESULT = {"role": "tool", "content": RESULT, "tool_call_id": "abcdefghi"}
PART = "probe_of_a_part"
PROBE_PARTS = [{"type": "text", "text": PART}, {"type": "text", "text": PART}]
BEFORE: dict[str, list[dict[str, Any]]] = {"assistant": [PROBE_QUESTION], "tool": [PROBE_QUESTION, PROBE_ANSWER]}


class ChatDialect:
    """See the module. tokens: which the detokenizer must show the parsers. Raises ConfigError for unknown parsers."""

    def __init__(self, template: ChatTemplate | None, options: ModelOptions, model_type: str):
        source = "" if template is None else template.source
        self.template = template
        self.calls = choose_format(options.tool_call_parser, source, model_type)
        self.tags = choose_tags(options.reasoning_parser, source)
        self.tokens = (*(self.calls.tokens if self.calls else ()), *(self.tags or ()))
        conversation = [PROBE_QUESTION, PROBE_ANSWER, PROBE_RESULT]
        silent = [PROBE_QUESTION, PROBE_ANSWER | {"content": None}, PROBE_RESULT]
        self._takes_tools = self._writes(TOOL, [PROBE_QUESTION])
        self._no_content = None if CALL in (text := self._probe(silent)) and "None" not in text else ""  # beside calls
        self._takes_calls = self._no_content is None or self._writes(CALL, conversation)
        self._takes_results = self._writes(RESULT, conversation)
        self._takes_parts = {role: self._reads_parts(role) for role in ROLES}

    def _reads_parts(self, role: str) -> bool:
        """Whether the template goes through the parts of such a message, and does not write them as a list."""
        after = [] if role in BEFORE else [PROBE_QUESTION] * (role != "user")
        text = self._probe([*BEFORE.get(role, ()), {"role": role, "content": PROBE_PARTS, "tool_call_id": "abcdefghi"}, *after])
        return text.count(PART) == len(PROBE_PARTS) and "'text'" not in text and '"text"' not in text

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template makes of a conversation with tools; "" where it refuses it."""
        try:
            return "" if self.template is None else self.template.render(messages, tools=PROBE_TOOLS)
        except ChatError:
            return ""

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it: content in one text unless it reads parts, none beside calls as it likes it."""
        content = message["content"]
        if isinstance(content, list) and not self._takes_parts[message["role"]]:
            content = "\n".join(part["text"] for part in content)
        return message | {"content": self._no_content if not content and "tool_calls" in message else content}

    def _writes(self, name: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template writes what has this name. One that refuses the probe may take other conversations."""
        try:
            return self.template is not None and name in self.template.render(messages, tools=PROBE_TOOLS)
        except ChatError:
            return True

    def prompt(self, request: Request, specials: SpecialTokens) -> tuple[str, Expected | None]:
        """The prompt's text, as of chat_text, and what the answer may hold, None for content alone. Raises ApiError and
        ChatError."""
        if self.template is None:
            raise bad_request("This model has no chat template; use /v1/completions, or start with --chat-template.", "messages")
        messages, choice = [self._fitted(message) for message in request.messages or ()], request.tool_choice
        tools = () if choice is not None and choice.mode == "none" else request.tools
        self._check(request, tools)
        described = [tool.described for tool in tools]
        generation, continued = request.add_generation_prompt is not False, request.continue_final_message
        text = chat_text(self.template, specials, messages, generation, continued, described, self._values(request))
        inside = self.tags is not None and text.rstrip().endswith(self.tags.open)
        if tools and choice is not None and choice.mode == "required":
            return self._forced(request, tools, text, inside)
        text, inside = self._held(request, tools, specials, text, inside)
        if self.calls is None or not tools:
            return text, Expected(self.tags, inside) if self.tags is not None else None
        return text, self._expected(request, tools, inside)

    def _expected(self, request: Request, tools: Sequence[Tool], inside: bool, prefix: str = "") -> Expected:
        names = frozenset(tool.name for tool in tools)
        return Expected(self.tags, inside, self.calls, names, request.parallel_tool_calls, prefix)

    def _forced(self, request: Request, tools: Sequence[Tool], text: str, inside: bool) -> tuple[str, Expected]:
        """A call that must come: its beginning stands in the prompt."""
        assert self.calls is not None  # _check
        prefix, grammar = forced_calls(self.calls, wanted(request), request.parallel_tool_calls)
        if request.grammar is not None and not request.grammar.param.startswith(FORMATS):
            message = f"'{request.grammar.param}' can't be used where 'tool_choice' asks for a call."
            raise bad_request(message, request.grammar.param, "invalid_value")
        request.grammar = GrammarField("tools", grammar, needed=False)
        if inside:  # a call is not preceded by reasoning
            text, inside = self._closed(text), False
        return text + prefix, self._expected(request, tools, inside, prefix)

    def _held(
        self, request: Request, tools: Sequence[Tool], specials: SpecialTokens, text: str, inside: bool
    ) -> tuple[str, bool]:
        """Make the request's grammar one of the whole answer: of calls that may come, as strict tools want them, and of reasoning
        before it. Returns the prompt's text and whether it is inside of reasoning. A grammar has no special tokens."""
        field, strict = request.grammar, [tool.name for tool in tools if tool.strict]
        if field is None and not strict:
            return text, inside
        with_calls = bool(tools) and self.calls is not None and not specials.in_text("".join(self.calls.text[:-1]))
        tags = None if self.tags is None or specials.in_text("".join(self.tags)) else self.tags
        if strict and not (with_calls and tags == self.tags):
            message = (
                f"'strict' of '{strict[0]}' needs a 'tool_choice' that asks for a call: this model's calls begin with tokens"
            )
            raise bad_request(f"{message} that no grammar has.", "tools", "unsupported_parameter")
        grammar = None if field is None else field.grammar
        of_content = field is not None and field.param.startswith(FORMATS)  # other fields are about all of the output
        if with_calls and self.calls is not None and (strict or of_content):
            grammar = held_calls(self.calls, tools, request.parallel_tool_calls, grammar)
        assert grammar is not None
        if tags is not None:
            grammar = after_reasoning(grammar, tags, inside)
        elif inside:
            text, inside = self._closed(text), False
        request.grammar = GrammarField("tools" if field is None else field.param, grammar)
        return text, inside

    def _closed(self, text: str) -> str:
        """A prompt behind its reasoning."""
        assert self.tags is not None
        return f"{text.rstrip()}\n\n{self.tags.close}\n\n"

    def _check(self, request: Request, tools: Sequence[Tool]) -> None:
        """Raise ApiError for what would not reach the model, or not come back as calls."""
        if tools and not self._takes_tools:
            raise bad_request("The chat template of this model takes no tools.", "tools", "unsupported_parameter")
        if tools and self.calls is None:
            message = "How this model writes tool calls is not known: start the server with --tool-call-parser."
            raise bad_request(message, "tools", "unsupported_parameter")
        for i, given in enumerate(request.messages or ()):
            if "tool_calls" in given and not self._takes_calls:
                where = f"messages[{i}].tool_calls"
                raise bad_request("The chat template of this model takes no tool calls.", where, "unsupported_parameter")
            if given["role"] == "tool" and not self._takes_results:
                where = f"messages[{i}].role"
                raise bad_request("The chat template of this model takes no results of tools.", where, "unsupported_parameter")

    def _values(self, request: Request) -> dict[str, Any]:
        """Values of the template's variables. Raises ApiError for a variable that it does not have."""
        values = dict(request.template_values)
        known = self.template.variables if self.template is not None else frozenset[str]()
        for name in values.keys() - known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            message = f"The chat template of this model has no variable '{name}'; {has}."
            raise bad_request(message, f"chat_template_kwargs.{name}"[:200], "unsupported_parameter")
        if request.reasoning_effort is not None:
            if "reasoning_effort" not in known:
                message = "The chat template of this model takes no 'reasoning_effort'."
                raise bad_request(message, "reasoning_effort", "unsupported_parameter")
            if "reasoning_effort" in values:
                raise bad_request("'reasoning_effort' is given twice.", "reasoning_effort", "invalid_value")
            values["reasoning_effort"] = request.reasoning_effort
        return values


def wanted(request: Request) -> Sequence[Tool]:
    """The tools among which the choice is."""
    name = request.tool_choice.name if request.tool_choice is not None else None
    return [tool for tool in request.tools if name in (None, tool.name)]
