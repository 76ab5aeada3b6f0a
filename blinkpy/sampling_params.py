"""The parameters of `LLM`'s requests, with vLLM's names. tests/plain/link/test_request_parameters.py compares the fields of
`SamplingParams` with the table of blinkpy.queues.request_parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETERS, RequestParameters, SamplingFields
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import HIGHEST_BIAS, MOST_BAD_WORDS, TokenRules, banned_sequences
from blinkpy.queues.words import TOP_LOGPROBS, Int32

OFFLINE = tuple(p for p in PARAMETERS if p.offline)


def _is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of a kind of `numbers`, such as NumPy's, but not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(values: Any, fine: Callable[[Any], Any]) -> bool:
    """Whether all values of an iterable pass a check. A text fails, because its values would be its
    characters.
    """
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping) and all(map(fine, values))


def _is_token(value: Any) -> bool:
    return _is_number(value, Integral) and 0 <= value <= INT32_MAX


def _id_of(token: Any) -> Any:
    """A token id. vLLM also accepts ids as text, as they are in JSON."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token


@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """How `LLM` generates, with vLLM's names and defaults. Raises ValueError for a value outside its range.

    n: outputs for each prompt, 1 to 128; their seeds count up, and the prompt is computed once.
    stop: a string that ends the output, or a list.
    stop_token_ids: token ids that end the output, in addition to the model's end-of-sequence ids.
    ignore_eos: True: the model's end-of-sequence ids don't end the output.
    grammar: grammar of the output, over bytes; `logprobs` then cover only the tokens that it allows.
    prompt_logprobs: `logprobs` for the prompt's tokens; such a prompt takes a step for each token.
    logit_bias: token ids with -100 to 100 to add to their logits.
    allowed_token_ids: no other token is generated.
    bad_words: texts that are not generated, at the start of a text or after a space.
    """

    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    grammar: ByteAutomaton | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for parameter in OFFLINE:
            value = getattr(self, parameter.name)
            if value is None and parameter.optional:
                continue
            if not _is_number(value, Real if parameter.is_float else Integral) or not parameter.in_bounds(value):
                kind = "" if parameter.is_float else "an integer of "
                raise ValueError(f"{parameter.name} must be {kind}{parameter.bounds_text}, not {value!r}")
        if not _is_number(self.n, Integral) or not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n must be 1 to {MAX_CHOICES}, not {self.n!r}")
        scores = self.prompt_logprobs
        if scores is not None and not (_is_number(scores, Integral) and 0 <= scores <= TOP_LOGPROBS):
            raise ValueError(f"prompt_logprobs must be 0 to {TOP_LOGPROBS}, not {scores!r}")
        if type(self.ignore_eos) is not bool:
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if not isinstance(self.grammar, ByteAutomaton | None):
            raise ValueError(f"grammar must be a ByteAutomaton, not {self.grammar!r}")
        self._check_tokens()
        words = () if self.bad_words is None else self.bad_words
        if not _are(words, lambda word: isinstance(word, str) and word.strip()) or len(words) > MOST_BAD_WORDS:
            raise ValueError(f"bad_words must be at most {MOST_BAD_WORDS} texts that are not only spaces, not {words!r}")
        stops: Any = self.stops() if isinstance(self.stop, str | Sequence) else self.stop
        if not _are(stops, lambda stop: isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH) or len(stops) > MAX_STOPS:
            raise ValueError(f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters, not {self.stop!r}")

    def _check_tokens(self) -> None:
        """Check the fields with token ids. Iterables such as arrays become tuples."""
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not _are(value, _is_token):
                raise ValueError(f"{name} must be token ids, not {value!r}")
            if value is not None:
                object.__setattr__(self, name, tuple(map(int, value)))
        for name in ("stop", "stop_token_ids"):  # vLLM's default: None
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must not be empty")
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping) or not all(_is_token(_id_of(token)) for token in biases):
            raise ValueError(f"logit_bias must be a dict by token ids, not {biases!r}")
        if not all(_is_number(bias, Real) and abs(bias) <= HIGHEST_BIAS for bias in biases.values()):
            raise ValueError(f"logit_bias must have biases of {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g}, not {biases!r}")

    def stops(self) -> tuple[str, ...]:
        """The strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def token_rules(self, vocab_size: int, encode: Callable[[str], Int32]) -> TokenRules | None:
        """The rules of logit_bias, allowed_token_ids and bad_words for a model; None without rules.

        encode: the tokens of a text, without special tokens. Raises ValueError for tokens outside the vocabulary.
        """
        if not self.logit_bias and self.allowed_token_ids is None and not self.bad_words:
            return None
        banned = banned_sequences(self.bad_words or (), encode)
        biases = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        return TokenRules(vocab_size, biases, self.allowed_token_ids, banned)

    def request_parameters(self, space: int, eos_ids: Sequence[int]) -> RequestParameters:
        """The parameters for the engine. space: tokens of the context after the prompt. Raises ValueError."""
        ids = tuple(dict.fromkeys([*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_ids)]))
        if len(ids) > STOP_IDS:
            raise ValueError(
                f"stop_token_ids must be at most {STOP_IDS} ids, the model's end-of-sequence ids included, not {len(ids)}"
            )
        if self.max_tokens is not None and self.max_tokens > space:
            raise ValueError(f"max_tokens must be at most {space}, which the prompt leaves of the context, not {self.max_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens}")
        if self.min_tokens > space:
            raise ValueError(f"min_tokens must be at most {space}, which the prompt leaves of the context, not {self.min_tokens}")
        given = {p: getattr(self, p.name) for p in OFFLINE}
        values = {
            p.name: p.from_request(None if value is None else float(value) if p.is_float else int(value))
            for p, value in given.items()
        }
        values["max_tokens"] = space if self.max_tokens is None else values["max_tokens"]
        return RequestParameters(**values, stop_ids=ids)


# For help(): the lines of all fields, in their order.
SamplingParams.__doc__ = (SamplingParams.__doc__ or "").replace("    n: ", f"{SamplingFields.field_lines()}\n    n: ", 1)
