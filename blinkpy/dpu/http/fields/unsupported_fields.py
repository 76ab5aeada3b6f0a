"""Fields of the APIs of OpenAI and vLLM that have no support here, with the values that ask for nothing.

Such a value is accepted, since clients send it by themselves; any other one is a 400 that says why. Known and unknown fields
are told apart: what stands in no table is refused whatever its value. tests/plain/front_end/test_api_fields.py compares with
the official client's types.
"""

from typing import Any, NamedTuple

from blinkpy.dpu.http.fields.grammar_fields import NO_EBNF

CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
GENERATING = (CHAT, COMPLETIONS)
ALL = (*GENERATING, RESPONSES)


class Unsupported(NamedTuple):
    """One field. harmless: values, beside null, that ask for nothing. Empty lists and objects are among them for most."""

    name: str
    endpoints: tuple[str, ...]
    harmless: tuple[Any, ...]
    why: str


_TRANSFER = "caches are not handed from server to server"
_NO_IMAGES = "models here take text alone"
_OF_BEAMS = "there is no beam search"
_OF_TOKENS = "see /tokenize"
_HOSTED = "for OpenAI's own service"
_STORED = "nothing is stored: with `store` false, clients send the whole conversation"

UNSUPPORTED = (
    Unsupported("access_programs", (RESPONSES,), ({},), _HOSTED),
    Unsupported("audio", (CHAT,), (), _NO_IMAGES),
    Unsupported("background", (RESPONSES,), (False,), "answers come on the connection that asks"),
    Unsupported("background_options", (RESPONSES,), ({},), "answers come on the connection that asks"),
    Unsupported("chat_template", (CHAT,), (), "see `--chat-template`"),
    Unsupported("context_management", (RESPONSES,), ([],), "no prompt is shortened"),
    Unsupported("conversation", (RESPONSES,), (), _STORED),
    Unsupported("documents", (CHAT,), ([],), "templates get no documents"),
    Unsupported("enable_response_messages", (RESPONSES,), (False,), _OF_TOKENS),
    Unsupported("early_stopping", GENERATING, (False,), _OF_BEAMS),
    Unsupported("ec_transfer_params", GENERATING, ({},), _TRANSFER),
    Unsupported("function_call", (CHAT,), ("none",), "see `tool_choice`"),
    Unsupported("functions", (CHAT,), ([],), "see `tools`"),
    Unsupported("guided_grammar", GENERATING, (), NO_EBNF),
    Unsupported("image", (RESPONSES,), ({},), _NO_IMAGES),
    Unsupported("kv_transfer_params", GENERATING, ({},), _TRANSFER),
    Unsupported("length_penalty", GENERATING, (1, 1.0), _OF_BEAMS),
    Unsupported("logits_processors", GENERATING, ([],), "clients bring no code"),
    Unsupported("logprob_token_ids", GENERATING, ([],), "see `logprobs`"),
    Unsupported("max_tool_calls", (RESPONSES,), (), _HOSTED),
    Unsupported("media_io_kwargs", (CHAT,), ({},), _NO_IMAGES),
    Unsupported("mm_processor_kwargs", (CHAT, RESPONSES), ({},), _NO_IMAGES),
    Unsupported("modalities", (CHAT,), (["text"],), _NO_IMAGES),
    Unsupported("moderation", (CHAT, RESPONSES), ({},), "there is no moderation here"),
    Unsupported("prediction", (CHAT,), (), "no output can be given in advance"),
    *(
        Unsupported(name, (RESPONSES,), (), _STORED)
        for name in ("previous_input_messages", "previous_response", "previous_response_id")
    ),
    Unsupported("prompt", (RESPONSES,), (), "nothing is stored"),
    Unsupported("prompt_cache_options", (CHAT, RESPONSES), ({},), "prefixes are cached while there is room"),
    Unsupported(
        "prompt_cache_retention", (CHAT, RESPONSES), ("in_memory", "in-memory"), "prefixes are cached while there is room"
    ),
    Unsupported("prompt_embeds", (COMPLETIONS,), ([],), "prompts are text or token ids"),
    Unsupported("repetition_detection", GENERATING, ({},), "see `repetition_penalty`"),
    Unsupported("return_mm_kwargs", GENERATING, (True,), _NO_IMAGES),
    Unsupported("return_prompt_text", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_token_ids", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_token_offsets", GENERATING, (False,), _OF_TOKENS),
    Unsupported("return_tokens_as_token_ids", GENERATING, (False,), _OF_TOKENS),
    Unsupported("routed_experts_prompt_start", GENERATING, (0,), "the experts of a token are in no answer"),
    Unsupported("store", ALL, (False,), "nothing is stored"),
    Unsupported("stream_interval", GENERATING, (1,), "each step's tokens are sent at once"),
    Unsupported("suffix", (COMPLETIONS,), ("",), "models here fill no gaps"),
    Unsupported("thinking_token_budget", GENERATING, (-1,), "reasoning has no limit of its own"),
    Unsupported("truncate_prompt_tokens", GENERATING, (), "no prompt is shortened"),
    Unsupported("truncation", (RESPONSES,), ("disabled",), "no prompt is shortened"),
    Unsupported("truncation_side", GENERATING, ("left", "right"), "no prompt is shortened"),
    Unsupported("use_beam_search", GENERATING, (False,), _OF_BEAMS),
    Unsupported("verbosity", (CHAT,), ("medium",), "ask for it in the messages"),
    Unsupported("vllm_xargs", ALL, ({},), "there are no extensions here"),
    Unsupported("watermarking", GENERATING, (False,), "texts have no watermarks"),
    Unsupported("web_search_options", (CHAT,), (), _HOSTED),
    *(
        Unsupported(name, GENERATING, (), "see `structured_outputs`")
        for name in ("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag")
    ),
)
