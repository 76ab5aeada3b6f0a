"""A request of the OpenAI API, checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blinkpy.dpu.http.fields.choice_fields import ToolChoice
from blinkpy.dpu.http.fields.grammar_fields import GrammarField, TextFormat
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.text.conversation_edits import Cleared, Clearing
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import Int32

Message = dict[str, Any]


@dataclass(slots=True)
class Request:
    """One checked request. Exactly one of messages and prompts is set."""

    parameters: RequestParameters  # all parameters except max_tokens and the model's end-of-sequence ids
    model: str | None = None
    messages: list[Message] | None = None
    clearing: Clearing | None = None  # which results to clear in the messages
    cleared: Cleared | None = None  # with the prompt
    prompts: list[str | list[int]] = field(default_factory=list)  # texts or lists of token ids
    prompt_tokens: int = 0  # total tokens of all prompts, once tokenized
    max_tokens: int | None = None  # None: up to the context's end
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # the request's own
    ignore_eos: bool = False
    service_tier: str | None = None  # the requested tier; after admission, the tier that the answer names
    stream: bool = False
    stream_usage: "StreamUsage" = field(default_factory=lambda: StreamUsage())
    n: int = 1  # choices for each prompt
    best_of: int | None = None  # choices generated per prompt; the n likeliest form the answer
    logprobs: bool = False  # of a chat; parameters.logprobs combines it with top_logprobs
    top_logprobs: int = 0
    add_special_tokens: bool | None = None  # None: true for a text prompt, false for messages
    parse_special: bool = False  # text in a prompt that spells a special token becomes that token
    skip_special_tokens: bool = True
    include_stop: bool = False
    add_generation_prompt: bool | None = None  # None: unless continue_final_message is set
    continue_final_message: bool = False
    request_id: str | None = None
    conversation_field: str = "messages"  # the field of the messages
    places: tuple[str, ...] = ()  # the path of each message, if they are not the entries of conversation_field
    effort_field: str = "reasoning_effort"
    limit_field: str = "max_tokens"  # the field's name in the request
    instructions: str | None = None  # of /v1/responses, as is metadata
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    keep: Callable[[dict[str, Any]], None] | None = None  # stores the complete response
    text_format: TextFormat | None = None
    tools: tuple[Tool, ...] = ()
    hidden_tools: tuple[str, ...] = ()  # types of tools that clients list by default, and the model does not see
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    template_values: dict[str, Any] = field(default_factory=dict)  # for the chat template
    reasoning_effort: str | None = None
    verbosity: str | None = None  # for templates with this variable
    wished_effort: str | None = None  # an effort that only templates with efforts use
    thinking: bool | None = None  # value for the template's reasoning switch; None: the default
    include_reasoning: bool = True
    expected: Expected | None = None  # parts of the answer other than content; known with the prompt
    grammar: GrammarField | None = None  # of the output
    automaton: ByteAutomaton | None = None  # of the grammar, once it is compiled
    logit_bias: dict[int, float] = field(default_factory=dict)  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # none: all are
    bad_words: tuple[str, ...] = ()
    rules: TokenRules | None = None  # made of the three fields above; known with the prompt
    checked: tuple[Any, tuple[int, ...], list[int]] | None = None  # for a queue pair: stop ids, and max_tokens of each prompt
    echo: bool = False
    echoes: "list[Echo]" = field(default_factory=list)  # of each prompt, with the prompt
    prompt_logprobs: int | None = None  # most likely tokens at each place of the prompt
    prediction: str | None = None  # of the output
    predicted: Int32 | None = None  # tokens of the prediction, known with the prompt

    def place(self, index: int, name: str) -> str:
        """The path of a message's field in the body. A message made from several items has the path of the first item."""
        if not self.places:
            return (
                f"{self.conversation_field}[{index}].{name}" if self.conversation_field == "messages" else self.conversation_field
            )
        return self.places[index]

    @property
    def scores_prompts(self) -> bool:
        """Whether the answer has log probabilities of prompts."""
        return self.prompt_logprobs is not None or (self.echo and self.parameters.logprobs >= 0)


class Echo(NamedTuple):
    """An echoed prompt: its text and, with log probabilities, the number of characters before each token."""

    text: str
    offsets: Int32 | None = None


class StreamUsage(NamedTuple):
    """Token counts that a stream shows."""

    at_end: bool = False
    with_each_event: bool = False
