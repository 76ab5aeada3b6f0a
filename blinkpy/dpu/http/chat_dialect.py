"""Converts a chat to the prompt's text, by the model's chat template and its formats of reasoning and calls."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from blinkpy.config import ConfigError, ModelOptions
from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.choice_fields import ToolChoice
from blinkpy.dpu.http.fields.grammar_fields import GrammarField
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.text.chat_template import ChatTemplate, TemplateRefusalError, chat_text
from blinkpy.dpu.text.conversation_fit import TemplateProbe
from blinkpy.dpu.text.conversation_forms import Fitted, text_of
from blinkpy.dpu.text.tokenizer import Shown, SpecialTokens
from blinkpy.dpu.tools.call_format import CallFormat, call_formats, choose_format
from blinkpy.dpu.tools.call_grammar import ANY_TEXT, after_reasoning, channel_answer, constrained_calls, forced_calls, with_tokens
from blinkpy.dpu.tools.harmony_calls import answer_begun, header_of
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.dpu.tools.reasoning import choose_tags

logger = logging.getLogger("blinkpy.frontend")

FORMATS = ("response_format", "text.format")  # fields about content, which an answer with a forced call lacks
CHANNEL_EFFORTS = ("low", "medium", "high")  # the training convention of models that answer in channels
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch reasoning on and off
UNTRAINED = "hermes"  # the format of forced calls for a model whose template does not support tools


class ChatDialect:
    """shown: tokens that parsers must see; ends: tokens that end an answer.

    Raises ConfigError for parsers that are unknown, or can't be combined.
    """

    def __init__(self, template: ChatTemplate | None, options: ModelOptions, model_type: str):
        with_tools = None if template is None else template.with_tools
        source = "".join(dict.fromkeys(one.source for one in (template, with_tools) if one is not None))
        self.template, self._probe = template, TemplateProbe(template)
        self._tools_probe = self._probe if with_tools is template else TemplateProbe(with_tools)
        self.calls = choose_format(options.tool_call_parser, source, model_type)
        self._whole = self.calls is not None and self.calls.whole
        self.tags = choose_tags(options.reasoning_parser, "" if self._whole else source)
        if self.calls is not None and self._whole and self.tags is not None:
            message = f"reasoning_parser must be auto or none with the format '{self.calls.name}', which has reasoning in it"
            raise ConfigError(f"{message}, not {options.reasoning_parser!r}")
        self._as_content = options.reasoning_parser == "none"
        names = (*(self.calls.tokens if self.calls else ()), *(self.tags or ()))
        self.shown = Shown(names, self.calls.marks if self.calls else ())
        self.ends = self.calls.ends if self.calls else ()

    @property
    def reasoning(self) -> str:
        """The name of the model's reasoning format."""
        if self._as_content:
            return "none"
        return "channels" if self._whole else f"{self.tags.open}...{self.tags.close}" if self.tags else "none"

    @property
    def call_format(self) -> str:
        """The name of the model's tool-call format."""
        return self.calls.name if self.calls and self._tools_probe.takes_tools else "none"

    def prompt(self, request: Request, specials: SpecialTokens) -> tuple[str, Expected | None]:
        """(the prompt's text, rendered by chat_text; the possible parts of the answer, or None for only content). Raises
        ApiError and ChatError."""
        if self.template is None:
            message = "This model has no chat template; use /v1/completions, or start with --chat-template."
            raise bad_request(message, request.conversation_field)
        shown = () if _choice(request).mode == "none" else request.tools
        template, probe = (self.template.with_tools, self._tools_probe) if shown else (self.template, self._probe)
        calls = self._calls_of(request, shown, probe)
        _check_continued(request)
        _check_calls(request, probe)
        values = self._values(request, template.variables)
        described = probe.described([tool.described for tool in shown]) if probe.takes_tools else []
        tools = [tool for tool in shown if _choice(request).allows(tool.name)]
        text = self._rendered(request, specials, template, probe, described, values)
        if self._whole:
            return text, self._in_channels(request, tools, specials, answer_begun(text))
        inside = self.tags is not None and self._is_inside(request, text)
        closed = self.tags is not None and text.rstrip().endswith(self.tags.close)
        if tools and must_call(request):
            assert calls is not None
            return self._forced(request, tools, specials, text, inside, calls)
        self._hold(request, tools, specials, None if closed else inside)
        if self.calls is None or not tools:
            return text, Expected(self.tags, inside) if self.tags is not None else None
        return text, self._expected(request, tools, inside)

    def _rendered(
        self,
        request: Request,
        specials: SpecialTokens,
        template: ChatTemplate,
        probe: TemplateProbe,
        tools: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises ApiError with the path of the message that the template rejects."""
        fitted = probe.fitted(request.messages or ())
        generation, continued = request.add_generation_prompt is not False, request.continue_final_message

        def text_of_form(form: Sequence[Fitted]) -> str:
            return chat_text(template, specials, [one.message for one in form], generation, continued, tools, values)

        try:
            return text_of_form(fitted)
        except TemplateRefusalError as error:
            for form in () if continued else probe.plain_forms(fitted):
                with contextlib.suppress(TemplateRefusalError):
                    text = text_of_form(form)
                    logger.warning(
                        "the chat template refuses a conversation (%s): it is sent as plain text; --chat-template sets another",
                        error,
                    )
                    return text
            place = request.place(*probe.refused_at(fitted, tools))
            raise bad_request(f"'{place}' does not fit this model's chat template: {error}", place, "invalid_messages") from error

    def _is_inside(self, request: Request, text: str) -> bool:
        """Whether the answer begins within reasoning, which the prompt or the continued message has opened."""
        assert self.tags is not None
        if text.rstrip().endswith(self.tags.open):
            return True
        said = text_of((request.messages or [{}])[-1].get("content")) if request.continue_final_message else ""
        return said.rfind(self.tags.open) > said.rfind(self.tags.close)

    def _expected(
        self, request: Request, tools: Sequence[Tool], inside: bool, prefix: str = "", calls: CallFormat | None = None
    ) -> Expected:
        names = frozenset(tool.name for tool in tools)
        parallel, closed = request.parallel_tool_calls, _choice(request).allowed is not None
        schemas = {tool.name: tool.parameters for tool in tools}
        custom = frozenset(tool.name for tool in request.tools if tool.format is not None)
        calls = calls or self.calls
        return Expected(self.tags, inside, calls, names, parallel, prefix, self._as_content, closed, schemas, custom)

    def _in_channels(self, request: Request, tools: Sequence[Tool], specials: SpecialTokens, begun: str) -> Expected:
        """The possible parts of an answer in channels. A grammar applies to its final message, or to the arguments of
        its calls.

        begun: the header of the message in which the prompt ends.
        """
        field, names = request.grammar, frozenset(tool.name for tool in tools)
        final = bool(begun) and not header_of(begun, names).reasons
        grammar = None if field is None else field.grammar
        needed = field is not None or must_call(request) or any(tool.strict for tool in tools)
        strict = any(tool.strict for tool in tools) or (field is None and _choice(request).allowed is not None)
        if must_call(request):
            _check_forced(request)
            if final:
                message = "'tool_choice' can't require a call if a message is continued."
                raise bad_request(message, "tool_choice", "invalid_value")
            grammar, field = channel_answer(wanted(request), None, True, bool(begun)), None
        elif final and strict:
            grammar = grammar or ANY_TEXT
        elif not final and (grammar is not None or strict):
            may_call = field is None or field.param.startswith(FORMATS)
            grammar = channel_answer(tools if may_call else (), grammar, False, bool(begun))
        if grammar is not None:
            param = "tools" if field is None else field.param
            request.grammar = GrammarField(param, with_tokens(grammar, specials.names), needed)
        return self._expected(request, tools, False, begun)

    def _forced(
        self, request: Request, tools: Sequence[Tool], specials: SpecialTokens, text: str, inside: bool, calls: CallFormat
    ) -> tuple[str, Expected]:
        """The parts of an answer with a forced call, whose beginning is in the prompt."""
        prefix, grammar = forced_calls(calls, wanted(request), request.parallel_tool_calls)
        _check_forced(request)
        # A model that does not see the tools needs the grammar to write valid arguments.
        request.grammar = GrammarField("tools", with_tokens(grammar, specials.names), needed=not self._tools_probe.takes_tools)
        if inside:  # no reasoning precedes a call
            text, inside = self._closed(text), False
        return text + prefix, self._expected(request, tools, inside, prefix, calls)

    def _hold(self, request: Request, tools: Sequence[Tool], specials: SpecialTokens, inside: bool | None) -> None:
        """Extend the request's grammar to the whole answer: to optional calls, for strict or allowed tools, and to
        reasoning before the answer.

        inside: whether the prompt has opened the reasoning; None if the prompt has also closed it.
        """
        field, strict = request.grammar, any(tool.strict for tool in tools)
        if field is None and not strict and not self._keeps_out(request):
            return
        grammar = None if field is None else field.grammar
        of_content = field is not None and field.param.startswith(FORMATS)  # other grammars apply to the whole output
        if tools and self.calls is not None and (strict or of_content or field is None):
            grammar = constrained_calls(
                self.calls, tools, request.parallel_tool_calls, grammar, self.tags if inside is False else None
            )
        assert grammar is not None
        if self.tags is not None and inside is not None:
            grammar = after_reasoning(grammar, self.tags, inside)
        needed = field is not None or strict
        request.grammar = GrammarField("tools" if field is None else field.param, with_tokens(grammar, specials.names), needed)

    def _keeps_out(self, request: Request) -> bool:
        """Whether a grammar can exclude forbidden calls while allowed tools accept any arguments."""
        return _choice(request).allowed is not None and self.calls is not None and self.calls.text.arguments is None

    def _closed(self, text: str) -> str:
        """A prompt with closed reasoning."""
        assert self.tags is not None
        return f"{text.rstrip()}\n\n{self.tags.close}\n\n"

    def _calls_of(self, request: Request, tools: Sequence[Tool], probe: TemplateProbe) -> CallFormat | None:
        """The format of the answer's calls.

        A model whose template does not support tools can still be forced to call one. Raises ApiError for tools that
        would not reach the model, or whose calls could not be parsed.
        """
        if tools and not probe.takes_tools:
            if not must_call(request):
                message = (
                    "This model's chat template does not support tools; it supports calls only with 'tool_choice': 'required'."
                )
                raise bad_request(message, "tools", "unsupported_parameter")
            return self.calls or call_formats()[UNTRAINED]
        if tools and self.calls is None:
            message = "The tool-call format of this model is unknown: start the server with --tool-call-parser."
            raise bad_request(message, "tools", "unsupported_parameter")
        return self.calls

    def _values(self, request: Request, known: frozenset[str]) -> dict[str, Any]:
        """Values of the template's variables. known: variables of the template. Raises ApiError for other variables."""
        values = dict(request.template_values)
        for name in values.keys() - known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            message = f"The chat template of this model has no variable '{name}'; {has}."
            raise bad_request(message, f"chat_template_kwargs.{name}"[:200], "unsupported_parameter")
        self._wish(request, known, values)
        if request.reasoning_effort is not None:
            if self._whole and request.reasoning_effort not in CHANNEL_EFFORTS:
                message = f"'{request.effort_field}' of this model must be one of {', '.join(CHANNEL_EFFORTS)}."
                raise bad_request(message, request.effort_field, "invalid_value")
            if request.reasoning_effort == "none" and "reasoning_effort" not in known:
                switch = next((name for name in SWITCHES if name in known), None)
                if switch is not None:
                    return {switch: False, **values}
                if self.tags is None and not self._whole and not self._as_content:
                    return values  # the model does not reason
            if "reasoning_effort" not in known:
                message = f"This model's chat template does not support '{request.effort_field}'."
                raise bad_request(message, request.effort_field, "unsupported_parameter")
            if "reasoning_effort" in values:
                raise bad_request(f"'{request.effort_field}' is given twice.", request.effort_field, "invalid_value")
            values["reasoning_effort"] = request.reasoning_effort
        return values

    def _wish(self, request: Request, known: frozenset[str], values: dict[str, Any]) -> None:
        """Set the template's variables from fields that clients send to any model. Unknown variables are skipped."""
        switch = next((name for name in SWITCHES if name in known), None)
        if request.thinking is not None and switch is not None:
            values.setdefault(switch, request.thinking)
        if request.verbosity is not None and "verbosity" in known:
            values.setdefault("verbosity", request.verbosity)
        effort = request.wished_effort or ("low" if request.thinking is False and self._whole else None)
        if effort is not None and "reasoning_effort" in known:
            fits = not self._whole or effort in CHANNEL_EFFORTS
            values.setdefault("reasoning_effort", effort if fits else CHANNEL_EFFORTS[-1])


def _check_continued(request: Request) -> None:
    """Raise ApiError for a last message that can't be continued, because calls follow its text."""
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        message = "'continue_final_message' can't be combined with 'add_generation_prompt'."
        raise bad_request(message, "add_generation_prompt", "invalid_value")
    messages = request.messages or ()
    if messages and "tool_calls" in messages[-1]:
        message = "'continue_final_message' can't be used if the last message has tool calls."
        raise bad_request(message, request.place(len(messages) - 1, "tool_calls"), "invalid_value")


def _check_calls(request: Request, probe: TemplateProbe) -> None:
    """Raise ApiError for calls and results that the template would omit."""
    for i, given in enumerate(request.messages or ()):
        if "tool_calls" in given and not probe.takes_calls:
            where = request.place(i, "tool_calls")
            raise bad_request("This model's chat template does not support tool calls.", where, "unsupported_parameter")
        if given["role"] == "tool" and not probe.takes_results:
            where = request.place(i, "role")
            raise bad_request("This model's chat template does not support tool results.", where, "unsupported_parameter")


def _choice(request: Request) -> ToolChoice:
    return request.tool_choice or ToolChoice()


def must_call(request: Request) -> bool:
    """Whether the answer must be a call."""
    return _choice(request).mode == "required"


def _check_forced(request: Request) -> None:
    """Raise ApiError for a grammar of other text if the answer must be a call."""
    if request.grammar is not None and not request.grammar.param.startswith(FORMATS):
        message = f"'{request.grammar.param}' can't be used if 'tool_choice' requires a call."
        raise bad_request(message, request.grammar.param, "invalid_value")


def wanted(request: Request) -> Sequence[Tool]:
    """The tools among which the model may choose."""
    choice = _choice(request)
    return [tool for tool in request.tools if choice.name in (None, tool.name) and choice.allows(tool.name)]
