"""Requests of /v1/completions, and of /tokenize and /detokenize in vLLM's shapes, from a body to a Request."""

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.http.fields.body_errors import missing
from blinkpy.dpu.http.fields.body_model import Body, doc, only, rule
from blinkpy.dpu.http.fields.chat_fields import Continue, GenerationPrompt, Messages, Tools, messages
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.request_body import load, read, refuse_unsupported
from blinkpy.dpu.http.fields.shared_fields import (
    Completing,
    PromptLogprobs,
    TemplateValues,
    TokenId,
    sampling_fields,
    template_values,
)
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS_BYTES, chat_tools, check_size
from blinkpy.dpu.http.fields.unsupported_fields import COMPLETIONS, NO_IMAGES, SEE_TEMPLATE, unsupported_fields
from blinkpy.queues.request_parameters import INT32_MAX, RequestParameters

MAX_PROMPTS = 128  # in one request
ParseSpecial = Annotated[bool | None, doc("true: text that spells a special token becomes that token", "false")]


if TYPE_CHECKING:
    _Base = Completing
else:
    _Base = sampling_fields("_CompletionBase", "completions", unsupported_fields("_Unsupported", COMPLETIONS, Completing))


class CompletionBody(_Base, kw_only=True):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)],
        doc(f"a text, a list of token ids, or up to {MAX_PROMPTS} of these"),
    ]
    add_special_tokens: Annotated[bool | None, doc("false: add no special tokens, such as a begin-of-text token", "true")] = None
    parse_special: ParseSpecial = None
    echo: Annotated[
        bool | None, doc("true: the text begins with the prompt, and `logprobs` (not with `stream`) with its tokens", "false")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32_MAX), rule(f"1 to {INT32_MAX}")] | None,
        doc(
            "most tokens of the output: at least 1, with `echo` 0; prompt and output must fit into the context",
            "the model's `max_new_tokens`, else the rest of the context",
        ),
    ] = None
    prompt_logprobs: PromptLogprobs = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        doc(f"`n` to {MAX_CHOICES}: the `n` choices with the highest mean log probability; not with `stream` or `echo`", "`n`"),
    ] = None


def parse_completion(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """The request of a body of /v1/completions. defaults: the model's defaults. Raises ApiError with status 400."""
    fields = load(body)
    given = read(fields, CompletionBody)
    request = Request(
        **given.completing(defaults, fields),
        prompts=prompts(given.prompt),
        add_special_tokens=given.add_special_tokens,
        parse_special=given.parse_special is True,
        echo=given.echo is True,
        prompt_logprobs=given.prompt_logprobs,
        best_of=given.best_of,
    )
    if request.best_of is not None and request.best_of < request.n:
        raise bad_request(f"'best_of' must be at least 'n', {request.n}, not {request.best_of}.", "best_of", "invalid_value")
    for name, wanted in (("stream", request.stream), ("echo", request.echo)):
        if request.best_of not in (None, request.n) and wanted:
            raise bad_request(f"'best_of' above 'n' can't be used with '{name}': true.", "best_of", "invalid_value")
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("'max_tokens' must be at least 1 without 'echo': true.", "max_tokens", "invalid_value")
    if request.scores_prompts and request.stream:
        name = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
        what = "'echo' with 'logprobs'" if name == "echo" else f"'{name}'"
        raise bad_request(f"{what} can't be used with 'stream': true.", name, "invalid_value")
    return request


def prompts(given: Any) -> list[str | list[int]]:
    """The prompts of a request: texts, and lists of token ids. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if type(given[0]) is int:
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise bad_request(f"'prompt' must hold at most {MAX_PROMPTS} prompts, not {len(given)}.", "prompt", "invalid_value")
    for prompt in given:
        if type(prompt) is int or (type(prompt) is list and not set(map(type, prompt)) <= {int}):
            message = "'prompt' must be a text, an array of token ids, or an array of texts and arrays of token ids."
            raise bad_request(message, "prompt", "invalid_type")
        if prompt == []:  # an empty text is refused later: a tokenizer may add tokens to it
            raise bad_request("'prompt' must not be empty.", "prompt", "invalid_value")
    return list(given)


# ---- tokens ----------------------------------------------------------------------------------------------------------


_NoImages = Annotated[Any, only({}, why=NO_IMAGES)]


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: Annotated[str | None, doc("the served name; other names cause a 404", "the served model")] = None
    prompt: Annotated[str | None, doc("a text")] = None
    messages: Annotated[Messages | None, doc("instead of `prompt`: a conversation")] = None
    add_special_tokens: Annotated[
        bool | None, doc("whether to add special tokens, such as a begin-of-text token", "true for a text")
    ] = None
    parse_special: ParseSpecial = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continue = None
    return_token_strs: Annotated[bool | None, doc("true: the answer has `token_strs`", "false")] = None
    chat_template_kwargs: TemplateValues = None
    tools: Tools = None
    chat_template: Annotated[Any, only(why=SEE_TEMPLATE)] = None
    media_io_kwargs: _NoImages = None
    mm_processor_kwargs: _NoImages = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Annotated[list[TokenId], doc("token ids; special ones become their texts")]
    model: Annotated[str | None, doc("the served name; other names cause a 404", "the served model")] = None


def parse_tokenize(body: bytes | bytearray) -> tuple[Request, bool]:
    """The request of a body of /tokenize, and whether it asks for the tokens' strings. Raises ApiError."""
    fields = load(body)
    given = read(fields, TokenizeBody)
    refuse_unsupported(given)
    if given.prompt is not None and given.messages is not None:
        raise bad_request("Give 'prompt' or 'messages', not both.", "prompt", "invalid_value")
    if given.prompt is None and given.messages is None:
        raise missing("prompt")
    if given.tools:
        check_size("tools", fields["tools"], MAX_TOOLS_BYTES)
    request = Request(
        parameters=RequestParameters(),
        model=given.model,
        prompts=[] if given.prompt is None else [given.prompt],
        messages=None if given.messages is None else messages(given.messages),
        add_special_tokens=given.add_special_tokens,
        parse_special=given.parse_special is True,
        add_generation_prompt=given.add_generation_prompt,
        continue_final_message=given.continue_final_message is True,
        template_values=template_values(given.chat_template_kwargs),
        tools=chat_tools(given.tools) if given.tools else (),
    )
    return request, given.return_token_strs is True


def parse_detokenize(body: bytes | bytearray) -> tuple[str | None, list[int]]:
    """Model and token ids of a body of /detokenize. Raises ApiError."""
    given = read(load(body), DetokenizeBody)
    return given.model, given.tokens
