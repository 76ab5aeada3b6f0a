"""Results of `LLM` for a prompt."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and the token's text."""

    logprob: float
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation. token_ids include a stop token; text has neither that nor a stop string.
    logprobs: for each of token_ids the most likely tokens by id, in descending order, and the generated one;
    None unless asked for. message: of a chat, for the conversation to continue with: role, content,
    reasoning_content and tool_calls as in OpenAI's API.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    logprobs: list[dict[int, Logprob]] | None = None
    message: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs.

    prompt: None if token ids were given.
    prompt_logprobs: for each of prompt_token_ids as in CompletionOutput.logprobs, None for the first; None
        unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
