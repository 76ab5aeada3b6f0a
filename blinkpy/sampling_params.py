"""How `LLM` generates: vLLM's names for the parameters of a request."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, make_dataclass
from numbers import Integral, Real
from typing import Any

from blinkpy.dpu.banned_words import MOST_BAD_WORDS, banned_sequences
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.array_types import Int32
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETERS, RequestParameters
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import HIGHEST_BIAS, TokenRules

OFFLINE = tuple(p for p in PARAMETERS if p.offline)


def _type(is_float: bool, optional: bool) -> Any:
    kind: Any = float if is_float else int
    return kind | None if optional else kind


_FIELDS: list[Any] = [(p.name, _type(p.is_float, p.optional), field(default=p.default)) for p in OFFLINE]
_OWN: list[Any] = [
    ("n", int, field(default=1)),
    ("stop", str | Sequence[str] | None, field(default=())),
    ("stop_token_ids", Sequence[int] | None, field(default=())),
    ("ignore_eos", bool, field(default=False)),
    ("grammar", ByteAutomaton | None, field(default=None)),
    ("prompt_logprobs", int | None, field(default=None)),
    ("logit_bias", Mapping[int, float] | None, field(default=None)),
    ("allowed_token_ids", Sequence[int] | None, field(default=None)),
    ("bad_words", Sequence[str] | None, field(default=None)),
]
_Values: Any = make_dataclass("_Values", _FIELDS + _OWN, frozen=True, namespace={"__post_init__": lambda self: None})


def _is_number(value: Any, kind: type) -> bool:
    """Whether it is a number of a kind of `numbers`, such as NumPy's; bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(values: Any, fine: Callable[[Any], Any]) -> bool:
    """Whether it has values that are, and is no text, which would be its characters."""
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping) and all(map(fine, values))


def _is_token(value: Any) -> bool:
    return _is_number(value, Integral) and 0 <= value <= INT32_MAX


def _id_of(token: Any) -> Any:
    """A token id, which JSON has as text, and so may vLLM."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token


class SamplingParams(_Values):
    """How to generate; vLLM's names and defaults. A field for each sampling parameter of docs/api.md, but no cache_salt.

    n: outputs for each prompt, which is computed once; their seeds count up. max_tokens None: up to the model's context. seed
    None: a random one. logprobs: of the generated tokens and of this number (0 to 20) of most likely ones, from the model's
    distribution before penalties and temperature; None: of none. temperature 0 is greedy; top_k 0 or -1 is off. grammar: of the
    byte strings that the output may be; log probabilities are of what it allows. prompt_logprobs: of the prompt's tokens, and of
    this number (0 to 20) of most likely ones at each place; such a prompt takes a step for each token. logit_bias: added to the
    logits, -100 to 100, by token id. allowed_token_ids: no other token is generated. bad_words: texts that are not generated, at
    the start of a text or behind a space. Raises ValueError for a value outside its range.
    """

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
            raise ValueError(f"bad_words must be at most {MOST_BAD_WORDS} texts that are not spaces alone, not {words!r}")
        stops = self.stops() if isinstance(self.stop, str | Sequence) else self.stop
        if not _are(stops, lambda stop: isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH) or len(stops) > MAX_STOPS:
            raise ValueError(f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters, not {self.stop!r}")

    def _check_tokens(self) -> None:
        """The fields that have token ids. Those of others than sequences, such as an array's, become a tuple."""
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not _are(value, _is_token):
                raise ValueError(f"{name} must be token ids, not {value!r}")
            if value is not None:
                object.__setattr__(self, name, tuple(map(int, value)))
        for name in ("stop", "stop_token_ids"):  # None is vLLM's default
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
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def token_rules(self, vocab_size: int, encode: Callable[[str], Int32]) -> TokenRules | None:
        """logit_bias, allowed_token_ids and bad_words for a model; None without any. encode: without special tokens. Raises
        ValueError for what is not the model's."""
        if not self.logit_bias and self.allowed_token_ids is None and not self.bad_words:
            return None
        banned = banned_sequences(self.bad_words or (), encode)
        biases = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        return TokenRules(vocab_size, biases, self.allowed_token_ids, banned)

    def request_parameters(self, room: int, eos_ids: Sequence[int]) -> RequestParameters:
        """What the engine gets. room: tokens that the context leaves for the output."""
        ids = tuple(dict.fromkeys([*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)]))
        if len(ids) > STOP_IDS:
            raise ValueError(f"{len(ids)} stop token ids with the model's own; at most {STOP_IDS} are possible")
        if self.max_tokens is not None and self.max_tokens > room:
            raise ValueError(f"max_tokens is {self.max_tokens}, and the context leaves {room}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, and max_tokens {self.max_tokens}")
        given = {p: getattr(self, p.name) for p in OFFLINE}
        values = {
            p.name: p.from_request(None if value is None else float(value) if p.is_float else int(value))
            for p, value in given.items()
        }
        values["max_tokens"] = room if self.max_tokens is None else values["max_tokens"]
        return RequestParameters(**values, stop_ids=ids)
