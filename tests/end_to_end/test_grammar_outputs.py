"""Grammars from end to end: engines with random weights or synthetic tokens, and random automata. For any logits, an output is a
string of its automaton, or a prefix if max_tokens cuts it.

Claim outputs/grammars (simulator): With a grammar, the output is a string of it, or a prefix of one if
max_tokens ends it. Invalid automata and rules are refused.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.automata import automaton_of_choices, random_automaton
from support.engine_serving import collect, config_for, serving
from support.grammar_outputs import JSON, generate_legal_outputs, pieces
from support.schema_storm import TokenWalk, draw, engine_outputs, walk_outputs

from benchmarks.common.json_grammar import ENDLESS, byte_level_tokenizer, endless_objects
from blinkpy import LLM, SamplingParams
from blinkpy.config import ConfigError
from blinkpy.dpu.grammar.compile_grammar import TOKEN_BYTE, automaton_of_grammar, token_bytes
from blinkpy.engine.engine import make_engine
from blinkpy.engine.sizing import read_token_bytes
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", "null"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    sizes = {"slots": 12, "grammar_slots": 4, "max_model_len": 256, "check_integrity": "always"}
    with LLM("demo", device=request.param, load_format="dummy", dtype="float32", **sizes) as llm:
        yield llm


def test_every_output_is_a_string_of_its_automaton_or_a_prefix(llm: LLM, rng: np.random.Generator) -> None:
    generate_legal_outputs(llm, rng)


def test_outputs_under_random_schemas_are_valid(llm: LLM, seed: int) -> None:
    """A share of tools/fuzz_schemas.py."""
    tokens = read_token_bytes(DEMO_FOLDER, llm.tokenizer.vocab_size)
    assert tokens is not None
    counts = sum((found for _, found in walk_outputs(TokenWalk(tokens, llm.tokenizer.eos_ids[0]), seed, range(25), 2)), Counter())
    counts += engine_outputs(llm, seed, [draw(seed, number) for number in range(25)], 100)
    assert counts["ended"] > 25
    assert counts["closed"] > 25
    assert counts["engine ended"] > 5


@pytest.mark.parametrize("ends", [True, False])
def test_an_output_is_complete_at_max_tokens(llm: LLM, rng: np.random.Generator, ends: bool) -> None:
    """If max_tokens equal the bytes of the shortest output, but never with fewer tokens than the shortest output."""
    schema = {"type": "object", "required": ["name", "tags"], "properties": {
        "name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}, "more": {}}}  # fmt: skip
    grammar, shortest = automaton_of_grammar({"schema": schema}), len('{"name":"","tags":[]}')
    most = [int(m) for m in (rng.integers(shortest, 90, 8) if ends else rng.integers(1, 4, 8))]
    params = [SamplingParams(max_tokens=m, temperature=float(i % 4), grammar=grammar) for i, m in enumerate(most)]
    for done in llm.generate(["x"] * len(params), params):
        (out,) = done.outputs
        assert out.finish_reason == ("stop" if ends else "length"), out
        if ends:
            assert set(json.loads(out.text)) >= {"name", "tags"}


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_outputs_have_any_number_of_tokens(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Grammars of the benchmark of decode steps: no token reaches their end, so even few tokens do not lead an output to it."""
    vocab_size = 1000
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": vocab_size}))
    (tmp_path / "tokenizer.json").write_text(byte_level_tokenizer(vocab_size))
    grammar = endless_objects(kind)
    engine = make_engine(config_for(tmp_path, device="cpu", load_format="dummy", dtype="float32"))
    with serving(engine) as pair:
        most = [int(n) for n in (1, *rng.integers(2, 200, 7))]
        prompts = rng.integers(0, vocab_size, (len(most), 8), np.int32)
        asked = [pair.submit(one, RequestParameters(max_tokens=n), grammar=grammar) for one, n in zip(prompts, most, strict=True)]
        assert [(len(tokens), finish) for tokens, finish in collect(pair, asked)] == [(n, FINISH_LENGTH) for n in most]


def test_an_output_may_have_one_form_alone(llm: LLM) -> None:
    """The output ends after its last token, which is part of the text, even with ignore_eos and min_tokens."""
    params = SamplingParams(
        max_tokens=200, grammar=automaton_of_choices([JSON]), ignore_eos=True, min_tokens=199, temperature=2.0
    )
    (done,) = llm.generate("a key:", params)
    assert done.outputs[0].text.encode() == JSON
    assert done.outputs[0].finish_reason == "stop"


def test_a_grammar_may_have_special_tokens(llm: LLM) -> None:
    """The output has the special token itself, never its spelling or another token."""
    grammar = automaton_of_grammar({"sequence": [{"text": "so"}, {"token": "<|user|>"}, {"regex": "[a-z<|>]{1,9}"}]})
    outputs = llm.generate(["x"] * 20, SamplingParams(max_tokens=60, grammar=grammar, temperature=5.0))
    (user,) = llm.tokenizer.encode("<|user|>", False, parse_special=True)
    for out in (done.outputs[0] for done in outputs):
        assert out.finish_reason == "stop"
        assert list(out.token_ids).count(user) == 1
        text = llm.tokenizer.decode(out.token_ids, skip_special_tokens=False)
        assert re.fullmatch(r"so<\|user\|>[a-z<|>]{1,9}(<\|end\|>)?", text)


def test_log_probabilities_are_of_what_the_grammar_allows(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, grammar=automaton_of_choices([b"a", b"b"]), logprobs=5, temperature=0.0)
    (done,) = llm.generate("x", params)
    (table,) = done.outputs[0].logprobs or ()
    if llm.config.engine.device == "cpu":
        assert sorted(entry.decoded_token for entry in table.values()) == ["a", "b"]
        assert sum(np.exp(entry.logprob) for entry in table.values()) == pytest.approx(1, abs=1e-4)


def test_a_grammar_above_the_limit_is_reported(llm: LLM, rng: np.random.Generator) -> None:
    large = random_automaton(rng, states=20_000, classes=50)
    with pytest.raises(ValueError, match=r"prompt 0: the grammar takes .* bytes as an automaton"):
        llm.generate("x", SamplingParams(grammar=large))


def test_engines_without_grammars_take_none() -> None:
    with (
        LLM("demo", device="null", grammar_slots=0) as llm,
        pytest.raises(ValueError, match="the engine does not support grammars"),
    ):
        llm.generate("x", SamplingParams(grammar=automaton_of_choices([b"x"])))


def test_options_that_clash_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"grammar_arena_kib \(2047\) is too small: it must hold a grammar and token rules of grammar_kib"
    ):
        LLM("demo", device="null", grammar_arena_kib=2047)


def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(llm: LLM) -> None:
    spelled = pieces(llm)
    for text in ("hello world", "a\tb é 漢字 {}", JSON.decode()):
        ids = llm.tokenizer.encode(text, add_special_tokens=False).tolist()
        assert b"".join(spelled[token] for token in ids).decode() == text
    names = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
    assert [piece for piece in spelled if TOKEN_BYTE in piece] == [token_bytes(name) for name in names], "no other token"


def test_a_model_without_a_tokenizer_of_bytes_has_no_grammars(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    written = {
        "has no tokenizer.json": None,
        "can't read": "{",
        "depend on earlier tokens": json.dumps(tokenizer | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}),
    }
    for reason, text in written.items():
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        assert read_token_bytes(tmp_path, 10) is None
        assert reason in caplog.messages[-1]
