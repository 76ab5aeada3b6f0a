"""One output of a prompt, as work of the offline API's engine loop."""

import time

from blinkpy.dpu.generation import Generation, PromptScores, TokenLogprobs, TokenSpeller, excluding, scoring_parameters
from blinkpy.dpu.text.tokenizer import Shown, Tokenizer
from blinkpy.outputs import CompletionOutput, Logprob
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import Int32
from blinkpy.sampling_params import SamplingParams


class OutputWork:
    """One output of a prompt, and the sink of its text. Implements blinkpy.serving.engine_loop.Work.

    index: the prompt's index.
    ids: the prompt's tokens, int32 [n].
    sampling: parameters of this output alone, made from `params`.
    showing: special tokens with text.
    leader: the generation of the prompt's first output; this output starts after its first token.
    rules: token rules.
    scores: the prompt's log probabilities, if this output provides them.
    """

    def __init__(
        self,
        index: int,
        ids: Int32,
        sampling: RequestParameters,
        params: SamplingParams,
        tokenizer: Tokenizer,
        leader: Generation | None,
        showing: Shown,
        rules: TokenRules | None,
        scores: PromptScores | None,
    ):
        self._with_logprobs, self._leader = sampling.logprobs >= 0, leader
        began, detokenizer = time.monotonic(), tokenizer.detokenizer(ids, showing=showing)
        generation = Generation(index, len(ids), detokenizer, params.stops(), began, self, sampling.logprobs)
        generation.grammar = params.grammar
        generation.rules = rules
        generation.min_tokens = params.min_tokens
        generation.scores, generation.scoring = scores, scores is not None and not scores.complete
        generation.excluding = excluding(rules, params.grammar, params.stop_token_ids or ())
        self.generation = generation
        self.submission = generation, ids, sampling if scores is None else scoring_parameters(sampling)
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        self._parts.append(text)
        self._logprobs += logprobs

    def ended(self, generation: Generation) -> None:
        """EngineLoop detects the end."""

    def send(self) -> None:
        """The text is kept until the end."""

    @property
    def may_start(self) -> bool:
        """Whether the prompt's pages are cached, or no other output will cache them."""
        return self._leader is None or self._leader.tokens > 0 or not self._leader.open

    @property
    def tokens(self) -> list[int]:
        """Ids of the output, without tokens that the engine sent after a stop string."""
        flight = self.generation.flight
        return [] if flight is None else flight.output[: self.generation.tokens]

    def prompt_logprobs(self, spell: TokenSpeller) -> list[dict[int, Logprob] | None] | None:
        """Log probabilities of the prompt, for RequestOutput, if this output provides them."""
        scores = self.generation.scores
        if scores is None:
            return None
        return [None if entry.logprob is None else _table(entry, spell) for entry in scores.entries]

    def output(self, index: int, spell: TokenSpeller) -> CompletionOutput:
        """The result, after the end of the request. spell: the tokenizer's method."""
        logprobs = [_table(entry, spell) for entry in self._logprobs] if self._with_logprobs else None
        return CompletionOutput(index, "".join(self._parts), self.tokens, self.generation.finish_reason or "", logprobs)


def _table(entry: TokenLogprobs, spell: TokenSpeller) -> dict[int, Logprob]:
    """The log probabilities at one position, by token id."""
    pairs = entry.top if entry.logprob is None else (*entry.top, (entry.token, entry.logprob))
    return {token: Logprob(logprob, spell(token)[0]) for token, logprob in pairs}
