"""Unsupported fields of OpenAI's and vLLM's APIs, with the values that have no effect.

Clients send such a value by default, so it is accepted. Any other value causes a 400 with the reason. A field outside
all tables is unknown, and refused with any value. tests/plain/front_end/test_api_fields.py compares with the official
client's types.
"""

from typing import Annotated, Any, NamedTuple

import msgspec

from blinkpy.dpu.http.fields.body_model import Body, only
from blinkpy.dpu.http.fields.grammar_fields import NO_EBNF

CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
GENERATING = (CHAT, COMPLETIONS)
ALL = (*GENERATING, RESPONSES)


class Unsupported(NamedTuple):
    """One field. harmless: values other than null without an effect, often an empty list or object."""

    name: str
    endpoints: tuple[str, ...]
    harmless: tuple[Any, ...]
    why: str


_TRANSFER = "caches are not transferred between servers"
NO_IMAGES = "models accept text only"
SEE_TEMPLATE = "see `--chat-template`"
_OF_BEAMS = "beam search is not implemented"
_OF_TOKENS = "see /tokenize"
_HOSTED = "for OpenAI's own service"
STORED = "responses are not stored: with `store` false, clients send the whole conversation"

UNSUPPORTED = (
    Unsupported("access_programs", (RESPONSES,), ({},), _HOSTED),
    Unsupported("audio", (CHAT,), (), NO_IMAGES),
    Unsupported("best_of", (CHAT,), (1,), "a prompt has one choice"),
    Unsupported("background", (RESPONSES,), (False,), "answers are sent on the connection of the request"),
    Unsupported("background_options", (RESPONSES,), ({},), "answers are sent on the connection of the request"),
    Unsupported("chat_template", (CHAT,), (), SEE_TEMPLATE),
    Unsupported("context_management", (RESPONSES,), ([],), "no prompt is shortened"),
    Unsupported("conversation", (RESPONSES,), (), STORED),
    Unsupported("documents", (CHAT,), ([],), "templates don't get documents"),
    Unsupported("enable_response_messages", (RESPONSES,), (False,), _OF_TOKENS),
    Unsupported("echo", (CHAT,), (False,), "see `continue_final_message`"),
    Unsupported("early_stopping", GENERATING, (False,), _OF_BEAMS),
    Unsupported("ec_transfer_params", GENERATING, ({},), _TRANSFER),
    Unsupported("function_call", (CHAT,), ("none",), "see `tool_choice`"),
    Unsupported("functions", (CHAT,), ([],), "see `tools`"),
    Unsupported("guided_grammar", GENERATING, (), NO_EBNF),
    Unsupported("image", (RESPONSES,), ({},), NO_IMAGES),
    Unsupported("kv_transfer_params", GENERATING, ({},), _TRANSFER),
    Unsupported("length_penalty", GENERATING, (1, 1.0), _OF_BEAMS),
    Unsupported("logits_processors", GENERATING, ([],), "clients can't send code"),
    Unsupported("logprob_token_ids", GENERATING, ([],), "see `logprobs`"),
    Unsupported("media_io_kwargs", (CHAT,), ({},), NO_IMAGES),
    Unsupported("mm_processor_kwargs", (CHAT, RESPONSES), ({},), NO_IMAGES),
    Unsupported("modalities", (CHAT,), (["text"],), NO_IMAGES),
    Unsupported("moderation", (CHAT, RESPONSES), ({},), "moderation is not implemented"),
    *(
        Unsupported(name, (RESPONSES,), (), STORED)
        for name in ("previous_input_messages", "previous_response", "previous_response_id")
    ),
    Unsupported("prompt", (RESPONSES,), (), "nothing is stored"),
    Unsupported("prompt_cache_options", (CHAT, RESPONSES), ({},), "prefixes are cached until their pages are evicted"),
    Unsupported(
        "prompt_cache_retention",
        (CHAT, RESPONSES),
        ("in_memory", "in-memory", "24h"),
        "prefixes are cached until their pages are evicted",
    ),
    Unsupported("prompt_embeds", (COMPLETIONS,), ([],), "prompts are text or token ids"),
    Unsupported("repetition_detection", GENERATING, ({},), "see `repetition_penalty`"),
    Unsupported("return_mm_kwargs", GENERATING, (True,), NO_IMAGES),
    Unsupported("return_prompt_text", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_token_ids", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_token_offsets", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_tokens_as_token_ids", GENERATING, (False,), _OF_TOKENS),
    Unsupported("routed_experts_prompt_start", GENERATING, (0,), "answers do not contain the experts of tokens"),
    Unsupported("store", ALL, (False,), "nothing is stored"),
    Unsupported("stream_interval", GENERATING, (1,), "each step's tokens are sent immediately"),
    Unsupported("suffix", (COMPLETIONS,), ("",), "models can't fill gaps"),
    Unsupported("thinking_token_budget", GENERATING, (-1,), "reasoning has no separate limit"),
    Unsupported("truncate_prompt_tokens", GENERATING, (), "no prompt is shortened"),
    Unsupported("truncation", (RESPONSES,), ("disabled",), "no prompt is shortened"),
    Unsupported("truncation_side", GENERATING, ("left", "right"), "no prompt is shortened"),
    Unsupported("use_beam_search", GENERATING, (False,), _OF_BEAMS),
    Unsupported("vllm_xargs", ALL, ({},), "extensions are not implemented"),
    Unsupported("watermarking", GENERATING, (False,), "texts have no watermarks"),
    Unsupported("web_search_options", (CHAT,), (), _HOSTED),
    *(
        Unsupported(name, GENERATING, (), "see `structured_outputs`")
        for name in ("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag")
    ),
)


def unsupported_fields(name: str, endpoint: str, base: type[Body]) -> Any:
    """A model that adds the unsupported fields of an endpoint."""
    fields: list[Any] = [
        (row.name, Annotated[Any, only(*row.harmless, why=row.why)], None) for row in UNSUPPORTED if endpoint in row.endpoints
    ]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)
