"""What a model's chat template takes, and how the model writes reasoning and tool calls: from a chat to the prompt's text."""

from collections.abc import Mapping, Sequence
from typing import Any

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.grammar_fields import GrammarField
from blinkpy.dpu.http.fields.request_fields import Request
from blinkpy.dpu.http.fields.tool_fields import NO_PARAMETERS, Tool
from blinkpy.dpu.text.chat_prompt import chat_text
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.special_tokens import SpecialTokens
from blinkpy.dpu.tools.call_format import choose_format
from blinkpy.dpu.tools.call_grammar import forced_calls
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.dpu.tools.reasoning import choose_tags

# A conversation that shows what a template writes of tools, calls and results: each has a name of its own.
TOOL, CALL, RESULT = "probe_of_a_tool", "probe_of_a_call", "probe_of_a_result"
PROBE_TOOLS = [{"type": "function", "function": {"name": TOOL, "description": "", "parameters": NO_PARAMETERS}}]
PROBE_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
PROBE_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": CALL, "arguments": {}}}
PROBE_ANSWER = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
PROBE_RESULT = {"role": "tool", "content": RESULT, "tool_call_id": "abcdefghi"}


class ChatDialect:
    """See the module. tokens: which the detokenizer must show the parsers. Raises ConfigError for unknown parsers."""

    def __init__(self, template: ChatTemplate | None, options: ModelOptions, model_type: str):
        source = "" if template is None else template.source
        self.template = template
        self.calls = choose_format(options.tool_call_parser, source, model_type)
        self.tags = choose_tags(options.reasoning_parser, source)
        self.tokens = (*(self.calls.tokens if self.calls else ()), *(self.tags or ()))
        conversation = [PROBE_QUESTION, PROBE_ANSWER, PROBE_RESULT]
        self._takes_tools = self._writes(TOOL, [PROBE_QUESTION])
        self._takes_calls, self._takes_results = self._writes(CALL, conversation), self._writes(RESULT, conversation)

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
        messages, choice = request.messages or [], request.tool_choice
        tools = () if choice is not None and choice.mode == "none" else request.tools
        self._check(request, tools)
        described = [tool.described for tool in tools]
        generation, continued = request.add_generation_prompt is not False, request.continue_final_message
        text = chat_text(self.template, specials, messages, generation, continued, described, self._values(request))
        inside = self.tags is not None and text.rstrip().endswith(self.tags.open)
        if self.calls is None or not tools:
            return text, Expected(self.tags, inside) if self.tags is not None else None
        prefix = ""
        if choice is not None and choice.mode == "required":
            prefix, grammar = forced_calls(self.calls, wanted(request), request.parallel_tool_calls)
            if request.grammar is not None:
                message = f"'{request.grammar.param}' can't be used where 'tool_choice' asks for a call."
                raise bad_request(message, request.grammar.param, "invalid_value")
            request.grammar = GrammarField("tools", grammar, needed=False)
            if inside and self.tags is not None:  # a call is not preceded by reasoning
                text, inside = f"{text.rstrip()}\n\n{self.tags.close}\n\n", False
        names = frozenset(tool.name for tool in tools)
        return text + prefix, Expected(self.tags, inside, self.calls, names, request.parallel_tool_calls, prefix)

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
