"""The results of the table of request parameters: entries, defaults, SamplingParams."""

import math
import re
from dataclasses import fields
from typing import Any, assert_type, get_type_hints

import numpy as np
import pytest

from blinkpy import SamplingParams
from blinkpy.queues import submission
from blinkpy.queues.request_parameters import PARAMETERS, Parameter, RequestParameters
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_BYTES, SQ_ENTRY_WORDS, WORD, neutral_entries, pack_entry


def test_entry_is_what_the_layout_says(rng: np.random.Generator) -> None:
    longest = {"i4": 2**31 - 1, "i8": 2**63 - 1}
    values = {
        p.name: float(np.float32(rng.normal())) if p.is_float else int(rng.integers(-longest[p.dtype], longest[p.dtype]))
        for p in PARAMETERS
    }
    packed = pack_entry(RequestParameters(**values, stop_ids=(7, 9)), 11, 12, 13, 14, 15, 16, 17)
    assert len(packed) == SQ_ENTRY_BYTES == SQ_ENTRY.itemsize == 4 * SQ_ENTRY_WORDS
    entry = np.frombuffer(packed, SQ_ENTRY)[0]
    for name, value in values.items():
        assert entry[name] == value, name
    names = ("request_id", "epoch", "slot", "prompt_offset", "prompt_length", "hash_offset", "hash_count")
    assert [int(entry[name]) for name in names] == [11, 12, 13, 14, 15, 16, 17]
    assert entry["stop_ids"].tolist() == [7, 9] + [-1] * 6
    assert not entry["spare"].any()
    assert len(entry["spare"]) >= 8
    default = np.frombuffer(pack_entry(RequestParameters(seed=0, max_tokens=16), 0, 0, 0, 0, 0, 0, 0), SQ_ENTRY)
    assert default == neutral_entries(1)
    with pytest.raises(ValueError, match="at most 8"):
        pack_entry(RequestParameters(stop_ids=tuple(range(9))), 1, 1, 0, 0, 1, 0, 0)
    with pytest.raises(ValueError, match="does not fit"):
        pack_entry(RequestParameters(seed=2**63), 1, 1, 0, 0, 1, 0, 0)


def test_words_are_where_the_fields_are(rng: np.random.Generator) -> None:
    words = rng.integers(-(2**31), 2**31, SQ_ENTRY_WORDS, dtype=np.int32)
    entry = words.view(SQ_ENTRY)[0]
    for name, word in WORD.items():
        field = np.atleast_1d(np.asarray(entry[name]))
        assert field.tobytes() == words[word:].tobytes()[: field.nbytes], name
    assert (submission.WORD_TOP_P, submission.WORD_STOP_IDS) == (WORD["top_p"], WORD["stop_ids"])
    assert words.view(np.int64)[submission.LONG_SEED] == entry["seed"]


def test_seeds_are_drawn_for_requests_without_one() -> None:
    entries = [np.frombuffer(pack_entry(RequestParameters(), 1, 1, 0, 0, 1, 0, 0), SQ_ENTRY)[0] for _ in range(3)]
    assert len({int(entry["seed"]) for entry in entries}) == 3


def test_choices_have_seeds_that_count_up_and_wrap_around(rng: np.random.Generator) -> None:
    """Against Python's integers, cut to 64 bits; nothing but the seed differs, and random ones stay random."""
    assert RequestParameters(top_k=5).variants(3) == [RequestParameters(top_k=5)] * 3
    for seed in (int(rng.integers(-(2**63), 2**63 - 1)), 2**63 - 2, -(2**63)):
        found = RequestParameters(seed=seed, top_k=5).variants(4)
        wanted = [int.from_bytes((seed + i & 2**64 - 1).to_bytes(8, "little"), "little", signed=True) for i in range(4)]
        assert found == [RequestParameters(seed=each, top_k=5) for each in wanted]


def test_a_changed_copy_has_other_values_and_no_other_names(rng: np.random.Generator) -> None:
    given: dict[str, Any] = {"seed": 3, "stop_ids": (4,)}
    one = RequestParameters(**given)
    for p in PARAMETERS:
        value = float(rng.random()) if p.is_float else int(rng.integers(100))
        assert one.changed(**{p.name: value}) == RequestParameters(**{**given, p.name: value})
    assert one.changed(stop_ids=(), top_k=7) == RequestParameters(seed=3, top_k=7)
    assert one == one.changed() == RequestParameters(**given)
    with pytest.raises((ValueError, TypeError), match="top_x"):  # the latter since Python 3.13
        one.changed(top_x=1)


def test_error_texts_state_the_exact_bounds() -> None:
    for p in PARAMETERS:
        low, apart, high = re.fullmatch(r"(?:above )?(\S+) (to|and at most) (\S+)", p.bounds_text).groups()  # type: ignore[union-attr]
        ends = [float(end) if p.is_float else int(end) for end in (low, high)]
        assert [p.in_bounds(end) for end in ends] == [apart == "to", True], p.bounds_text
        assert p.bounds_text.startswith("above ") == (apart != "to") == p.above_low
    assert any(p.above_low for p in PARAMETERS)


def test_the_engine_takes_what_the_apis_take(rng: np.random.Generator) -> None:
    """Also at the edges, as float32 rounds them."""
    for p, (word, lowest, highest, is_float) in zip(PARAMETERS, submission.CHECKS, strict=True):
        low, high = p.bounds
        span = max(-100, low), min(100, high)
        values: list[float] = [low, high, int(rng.integers(*span, endpoint=True))]
        if p.is_float:
            values += [float(rng.uniform(*span)), np.nextafter(low, 1), np.nextafter(high, 0)]
            values += [2.0**-149, 2.0**-150, 2.0**-151, 1e-60]
        for value in filter(p.in_bounds, values):
            packed = pack_entry(RequestParameters(**{p.name: p.from_request(value)}), 1, 1, 0, 0, 1, 0, 0)
            bits = int(np.frombuffer(packed, np.int32)[word])
            assert lowest <= (submission.order_key(bits) if is_float else bits) <= highest, (p.name, value)


def test_defaults_of_a_model() -> None:
    of_model = RequestParameters.of_model
    found = of_model({"temperature": 0.6, "top_k": 20.0, "top_p": None, "min_p": -0.0, "pad_token_id": 3, "seed": 4})
    assert found == RequestParameters(temperature=0.6, top_k=20)
    assert (type(found.top_k), math.copysign(1, found.min_p)) == (int, 1)
    assert of_model({"top_k": -1}).top_k == 0
    assert of_model({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    for name, value in (("top_p", "high"), ("top_p", 0), ("temperature", math.nan), ("min_p", True), ("top_k", -2)):
        with pytest.raises(ValueError, match=name):
            of_model({name: value})


def test_stop_ids_are_those_of_the_request_and_of_the_model(rng: np.random.Generator) -> None:
    """In this order and once each. `ignore_eos` is about those of the model alone."""
    for _ in range(100):
        own, model = (rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(2))
        for ignore, given in ((False, own), (True, own), (False, None), (True, None)):
            made = SamplingParams(stop_token_ids=given, ignore_eos=ignore).request_parameters(100, model)
            wanted = [*(given or []), *([] if ignore else model)]
            assert list(made.stop_ids) == sorted(set(wanted), key=wanted.index), (given, ignore, model)


def test_sampling_params_become_request_parameters() -> None:
    given = SamplingParams(temperature=0, top_k=-1, min_p=-0.0, logprobs=3, stop_token_ids=[7, 7, 2])
    found = given.request_parameters(100, [2, 5])
    assert found == RequestParameters(max_tokens=16, temperature=0.0, logprobs=3, stop_ids=(7, 2, 5))
    assert SamplingParams(max_tokens=None, ignore_eos=True).request_parameters(100, [2]) == RequestParameters(max_tokens=100)
    names = [item.name for item in fields(SamplingParams)]
    assert names[:3] == ["max_tokens", "min_tokens", "temperature"]
    assert {"stop", "stop_token_ids", "ignore_eos", "seed", "priority", "logprobs"} < set(names)
    assert not {"cache_salt", "flags"} & set(names)
    with pytest.raises(ValueError, match="max_tokens must be at most 100, which the prompt leaves of the context, not 101"):
        SamplingParams(max_tokens=101).request_parameters(100, [])
    assert SamplingParams(max_tokens=None, min_tokens=100).request_parameters(100, []).min_tokens == 100
    with pytest.raises(ValueError, match="min_tokens must be at most 100, which the prompt leaves of the context, not 101"):
        SamplingParams(max_tokens=None, min_tokens=101).request_parameters(100, [])
    with pytest.raises(ValueError, match="at most 8"):
        SamplingParams(stop_token_ids=range(9)).request_parameters(100, [])


def test_a_type_checker_knows_the_fields_of_sampling_params() -> None:
    """mypy judges `assert_type` in `make lint`."""
    params = SamplingParams(max_tokens=3, temperature=0.5, seed=7)
    assert assert_type(params.max_tokens, int | None) == 3
    assert assert_type(params.temperature, float) == 0.5
    assert assert_type(params.seed, int | None) == 7
    assert assert_type(params.top_k, int) == 0


def test_fields_of_sampling_params_are_those_of_the_table() -> None:
    """In its order, with its types and defaults, and each with a line of the class's help."""
    table = [p for p in PARAMETERS if p.offline]
    types = {p.name: float if p.is_float else int for p in table}
    hints, given = get_type_hints(SamplingParams), fields(SamplingParams)
    assert [item.name for item in given[: len(table)]] == [p.name for p in table]
    for p, item in zip(table, given, strict=False):
        kind: Any = types[p.name]
        assert hints[p.name] == (kind | None if p.optional else kind), p.name
        assert (type(item.default), item.default) == (type(p.default), p.default), p.name
    lines = (SamplingParams.__doc__ or "").splitlines()
    assert [line.split(":")[0].strip() for line in lines if re.match(r" {4}\w+: ", line)] == [item.name for item in given]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", None),
        ("temperature", 100.5),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", 1.0),
        ("presence_penalty", 2.1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [2**31]),
    ],
)
def test_sampling_params_have_bounds(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop", [5, [5], b"a", {"a": 1}]),
        ("stop_token_ids", [5, [1.0], [True], ["1"], [2**31], "12"]),
        ("allowed_token_ids", [5, [True], ["a"], [], (), "12", [-1]]),
        ("bad_words", [3, [3], "word", [" "], b"word"]),
        ("logit_bias", [[1], {"a": 1}, {-1: 1}, {True: 1}, {1: "x"}, {1: math.nan}, {1: 101}, {1: True}]),
        ("ignore_eos", ["no", 1, None]),
        ("grammar", ["x", {}]),
        ("n", [1.0, "1", True, None]),
        ("prompt_logprobs", [1.0, "1", True]),
        ("seed", [1.0, "1", True, 2**64]),
    ],
)
def test_sampling_params_of_another_kind_are_refused(name: str, values: list[Any]) -> None:
    """Immediately and by name, not at their use, or as if they were true."""
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must "):
            SamplingParams(**{name: value})


def test_sampling_params_tell_their_bounds() -> None:
    for p in (p for p in PARAMETERS if p.offline):
        low, high = p.bounds
        for value in (low - 1, high * 2 + 1, math.nan, 10**400):
            with pytest.raises(ValueError, match=rf"^{p.name} must be .*{re.escape(p.bounds_text)}, not "):
                SamplingParams(**{p.name: value})


def test_sampling_params_take_numbers_of_numpy_and_vllms_none() -> None:
    """As in vLLM, stop and stop_token_ids have the default None."""
    given: dict[str, Any] = {
        "max_tokens": np.int64(4), "seed": np.int64(2**63 - 1), "temperature": np.float32(0.5), "top_p": np.float64(0.5),
        "stop_token_ids": np.array([3, 4]), "n": np.int32(2), "logit_bias": {np.int64(3): np.float32(0.5)},
    }  # fmt: skip
    params = SamplingParams(stop=None, **given)
    found = params.request_parameters(100, [])
    assert found == RequestParameters(max_tokens=4, seed=2**63 - 1, temperature=0.5, top_p=0.5, stop_ids=(3, 4))
    assert all(type(value) in (int, float, tuple) for value in found if value is not None)
    assert [variant.seed for variant in found.variants(2)] == [2**63 - 1, -(2**63)]
    rules = params.token_rules(10, lambda text: np.zeros(0, np.int32))
    assert rules is not None and rules.biases == {3: 0.5}
    none = SamplingParams(stop=None, stop_token_ids=None)
    assert none == SamplingParams() and none.stops() == ()


def taken(check: tuple[int, int, int, int], entry: np.ndarray) -> bool:
    """Whether one check of the engine lets an entry, int32 [64], pass."""
    word, low, high, is_float = check
    bits = int(entry[word])
    return low <= (submission.order_key(bits) if is_float else bits) <= high


@np.errstate(over="ignore")
def test_the_engine_takes_each_parameter_within_its_bounds_and_no_other_value() -> None:
    assert len(submission.CHECKS) == len(PARAMETERS)
    for p, check in zip(PARAMETERS, submission.CHECKS, strict=True):
        (low, high), kind = p.accepted, np.dtype(f"<{p.dtype}").type
        assert check[3] == (1 if p.is_float else 0)
        if p.is_float:
            values = [
                kind(low),
                kind(high),
                *(np.nextafter(kind(edge), kind(to)) for edge in (low, high) for to in (-np.inf, np.inf)),
            ]
            values += [kind(value) for value in (-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf)]
        else:
            span = np.iinfo(kind)
            values = [kind(v) for v in (low - 1, low, low + 1, 0, high - 1, high, high + 1) if span.min <= v <= span.max]
        for value in values:
            entry = neutral_entries(1)
            entry[p.name] = value
            number = float(value) if p.is_float else int(value)
            fine = low <= number <= high and not (p.above_low and number == low)
            if p.is_float and number == 0 and low == 0 and math.copysign(1, number) < math.copysign(1, low):
                fine = False  # -0.0 where the least is 0.0
            assert taken(check, entry.view(np.int32)) == fine, (p.name, value)
    floats = np.array([-np.inf, -1, -1e-45, -0.0, 0.0, 1e-45, 2, np.inf], np.float32)
    keys = [submission.order_key(int(bits)) for bits in floats.view(np.int32)]
    assert keys == sorted(set(keys))
    assert keys[3:5] == [-1, 0]


def test_the_apis_take_each_parameter_within_its_bounds() -> None:
    for p in PARAMETERS:
        low, high = p.bounds
        step = 1 if not p.is_float else 1e-6
        inside = [low + step, high] + [low] * (not p.above_low)
        assert all(p.in_bounds(value) for value in inside if value <= high), p.name
        beyond = [low - 1, high + 1 if not p.is_float else math.nextafter(high, math.inf), *[low, float(low)] * p.above_low]
        assert not any(p.in_bounds(value) for value in beyond), p.name
    assert len(RequestParameters(stop_ids=tuple(range(8))).stop_ids) == 8
    assert len(pack_entry(RequestParameters(stop_ids=tuple(range(8))), 1, 1, 0, 0, 1, 0, 0)) == SQ_ENTRY_BYTES


def test_an_eight_byte_parameter_has_bounds_that_its_sign_tells() -> None:
    with pytest.raises(ImportError, match="the engine can only check the sign"):
        submission._check(Parameter("cache_salt", "i8", 0, (0, 9)))
