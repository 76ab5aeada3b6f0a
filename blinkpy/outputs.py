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
    """One generated continuation.

    index: position of the output among the prompt's outputs.
    text: without a stop token or stop string.
    token_ids: including a stop token.
    finish_reason: "stop" or "length".
    logprobs: the most likely tokens at each of token_ids, by id, in descending order, and the generated one;
        None unless requested.
    message: a chat's message, to continue the conversation: role, content, reasoning_content and tool_calls as in
        OpenAI's API.
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
    prompt_logprobs: the same for each of prompt_token_ids, None for the first; None
        unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
