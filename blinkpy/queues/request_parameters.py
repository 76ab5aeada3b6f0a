"""The parameters of a request, in one table from which all other declarations derive.

PARAMETERS gives:
- the fields of the submission entry, their packing and their indices (blinkpy.queues.submission)
- the engine's check of entries (blinkpy.scheduler.phases.intake)
- RequestParameters, with the defaults of a model
- HTTP fields (blinkpy.dpu.http.fields.shared_fields) and the checks of blinkpy.SamplingParams
- values for the simulator

A new scalar needs a row and a field of SamplingFields here, and the code of the samplers that applies it.
"""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from blinkpy.queues.words import TOP_LOGPROBS

Bounds = tuple[float, float]  # inclusive

INT32_RANGE: tuple[int, int] = (-(2**31), 2**31 - 1)
INT64_RANGE: tuple[int, int] = (-(2**63), 2**63 - 1)
INT32_MAX, INT64_MAX = INT32_RANGE[1], INT64_RANGE[1]
WEIGHT_ONE = 100  # `tenant_weight` for weight 1
FLOAT32_MAX = float.fromhex("0x1.fffffep127")
FLOAT32_LEAST = 2.0**-149  # smaller numbers may be rounded to 0
FINITE = (-FLOAT32_MAX, FLOAT32_MAX)

SUBMIT_NO_PREFIX_CACHE = 1  # of `flags`: neither use nor extend the prefix cache
SUBMIT_SCORE_PROMPT = 2  # begin with the prompt's first token; further prompt tokens follow as if sampled, one per step


class Parameter(NamedTuple):
    """One parameter."""

    name: str
    dtype: str  # in the entry: i4, i8 or f4
    neutral: float | None  # the value without effect; None: a random value
    accepted: Bounds  # the engine's range; NaN and infinity are always refused
    doc: str = ""  # for docs/api.md, after the range
    above_low: bool = False  # the lower bound itself is refused
    requested: Bounds | None = None  # the APIs' range, if it differs; values below `accepted` mean the neutral value
    http: str = "both"  # endpoints with this field: "both", "completions" or ""
    offline: bool = True  # SamplingParams has it
    from_model: bool = False  # generation_config.json may set the default
    kind: str = ""  # for docs/api.md, instead of the range

    @property
    def bounds(self) -> Bounds:
        """The range of the APIs."""
        return self.requested or self.accepted

    @property
    def is_float(self) -> bool:
        return self.dtype == "f4"

    @property
    def bounds_text(self) -> str:
        """The range of the APIs, as text."""
        low, high = (f"{bound:g}" if self.is_float else str(bound) for bound in self.bounds)
        return f"above {low} and at most {high}" if self.above_low else f"{low} to {high}"

    @property
    def optional(self) -> bool:
        """Whether SamplingParams accepts None."""
        return self.default is None or self.name == "max_tokens"

    @property
    def default(self) -> float | None:
        """The default of the APIs; None: absent."""
        return None if self.neutral is None or not self.in_bounds(self.neutral) else self.neutral

    def in_bounds(self, value: float) -> bool:
        """Whether the APIs accept a value."""
        low, high = self.bounds
        return low <= value <= high and not (self.above_low and value < low + FLOAT32_LEAST)

    def from_request(self, value: float | None) -> float | None:
        """The engine's value for a value of the APIs. None: absent."""
        if value is None or value < self.accepted[0]:
            return self.neutral
        return value + 0.0 if self.is_float else value  # -0.0 becomes 0.0


# In the order of RequestParameters, SamplingParams and the entry, except that the entry has values of 8 bytes
# first.
LIKELIEST = "the most likely tokens"
PENALTY = "subtracted from the logits of the output's tokens: for presence once, for frequency each time"
PARAMETERS = (
    Parameter("max_tokens", "i4", 16, (1, INT32_MAX), http=""),  # set by shared_fields.token_limit
    Parameter(
        "min_tokens",
        "i4",
        0,
        (0, INT32_MAX),
        "until then, no stop or end-of-sequence id is generated",
    ),
    Parameter(
        "temperature", "f4", 1.0, (-0.0, FLOAT32_MAX), "more is more random; 0 is greedy", requested=(0, 100), from_model=True
    ),
    Parameter(
        "top_p", "f4", 1.0, (0, 1), f"only {LIKELIEST} with this probability in all; 1 is off", above_low=True, from_model=True
    ),
    Parameter(
        "top_k",
        "i4",
        0,
        (0, INT32_MAX),
        f"only this many of {LIKELIEST}; -1 and 0 are off",
        requested=(-1, INT32_MAX),
        from_model=True,
    ),
    Parameter("min_p", "f4", 0.0, (0, 1), "minimum probability of a token, relative to the most likely token", from_model=True),
    Parameter(
        "repetition_penalty",
        "f4",
        1.0,
        (0, FLOAT32_MAX),
        "above 1, tokens of prompt and output become less likely",
        above_low=True,
        requested=(0, 100),
        from_model=True,
    ),
    Parameter("presence_penalty", "f4", 0.0, FINITE, PENALTY, requested=(-2, 2)),
    Parameter("frequency_penalty", "f4", 0.0, FINITE, PENALTY, requested=(-2, 2)),
    Parameter("seed", "i8", None, INT64_RANGE, "conditions for equal texts: docs/tuning.md"),
    Parameter("priority", "i4", 0, INT32_RANGE, "lower first, under the policy `priority`"),
    Parameter(
        "logprobs",
        "i4",
        -1,
        (-1, TOP_LOGPROBS),
        "log probabilities of the generated tokens, and of this many most likely tokens",
        requested=(0, TOP_LOGPROBS),
        http="completions",
    ),
    Parameter(
        "cache_salt",
        "i8",
        0,
        (0, INT64_MAX),
        "only requests with the same salt share prefixes",
        offline=False,
        kind="a string",
    ),
    Parameter("flags", "i4", 0, (0, SUBMIT_NO_PREFIX_CACHE | SUBMIT_SCORE_PROMPT), http="", offline=False),
    Parameter("tenant", "i4", 0, (0, INT32_MAX), http="", offline=False),  # tenant number of the API key; 0 without a key
    Parameter("best_effort", "i4", 0, (0, 1), http="", offline=False),  # class: 0 latency-sensitive, 1 best effort
    Parameter("tenant_weight", "i4", WEIGHT_ONE, (1, 1000 * WEIGHT_ONE), http="", offline=False),  # hundredths
    # Number of the prompt's last tokens that are output from another engine, for penalties and banned
    # sequences.
    Parameter("output_tokens", "i4", 0, (0, INT32_MAX), http="", offline=False),
)
PARAMETER = {parameter.name: parameter for parameter in PARAMETERS}


@dataclass(frozen=True)
class SamplingFields:
    """The parameters that `LLM` accepts: a field for each of PARAMETERS with `offline`, with its type and default.

    max_tokens: longest output, in tokens; None: up to the model's context.
    min_tokens: tokens before a stop or end-of-sequence id may be generated.
    temperature: 0 to 100; 0 is greedy.
    top_p: above 0, to 1: the most likely tokens with this probability in all; 1 is off.
    top_k: the most likely tokens; 0 and -1 are off.
    min_p: 0 to 1: minimum probability of a token, relative to the most likely token.
    repetition_penalty: above 0, to 100, for tokens of prompt and output; 1 is off.
    presence_penalty: -2 to 2, subtracted once from the logits of tokens in the output.
    frequency_penalty: -2 to 2, subtracted for each occurrence in the output.
    seed: seed of the random choices; None: random.
    priority: lower first, under the policy `priority`.
    logprobs: log probabilities of the generated tokens and of this many (0 to 20) most likely tokens, from the
        distribution before penalties and temperature; None: off.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    priority: int = 0
    logprobs: int | None = None

    @staticmethod
    def field_lines() -> str:
        """The lines of this docstring about fields."""
        return (SamplingFields.__doc__ or "").split("\n\n", 1)[1].rstrip()


_make_tuple: Any = namedtuple  # its fields are not known to a type checker
_Values: Any = _make_tuple("_Values", [*PARAMETER, "stop_ids"], defaults=[*(p.neutral for p in PARAMETERS), ()])


class RequestParameters(_Values):
    """Limits and sampling parameters of one request, checked by the APIs: a field for each of PARAMETERS, and stop_ids.

    stop_ids: at most submission.STOP_IDS token ids that end the request, end-of-sequence ids included.
    """

    __slots__ = ()

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> Self:
        """Defaults from a model's generation_config.json, interpreted like vLLM: null counts as absent, and
        `do_sample: false` means greedy. Raises ValueError for a value out of range.
        """
        values: dict[str, Any] = {}
        for p in PARAMETERS:
            value = generation_config.get(p.name)
            if value is None or not p.from_model:
                continue
            number = not isinstance(value, bool) and isinstance(value, (int, float))
            if not number or not p.in_bounds(value) or not (p.is_float or value == int(value)):
                raise ValueError(f"generation_config.json: {p.name} is {value!r:.200}; {p.bounds_text} is accepted")
            values[p.name] = p.from_request(value if p.is_float else int(value))
        samples = generation_config.get("do_sample")
        if samples is not None and not isinstance(samples, bool):
            raise ValueError(f"generation_config.json: do_sample is {samples!r:.200}; true or false is accepted")
        if samples is False:
            values["temperature"] = 0.0
        return cls(**values)

    def changed(self, **values: Any) -> Self:
        """A copy with other values."""
        changed: Self = self._replace(**values)
        return changed

    def variants(self, count: int) -> list[Self]:
        """Parameters for several choices of one prompt. A given seed is incremented per choice, and wraps around; a random seed
        stays random.
        """
        if self.seed is None:
            return [self] * count
        low = INT64_RANGE[0]
        return [self.changed(seed=(self.seed + i - low) % 2**64 + low) for i in range(count)]
