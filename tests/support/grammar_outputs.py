"""Requests with and without grammars for any engine, and checks of their outputs."""

from typing import Any

import numpy as np
from support.automata import automaton_of_choices, random_automaton
from support.compiled_grammars import automaton_of_schema

from blinkpy import LLM, SamplingParams
from blinkpy.engine.sizing import read_token_bytes
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.outputs import RequestOutput
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton

JSON = b'{"a": [1, 2.5, true], "key": "value", "x": {}}'


def pieces(llm: LLM) -> list[bytes]:
    """The bytes of each token of the demonstration model."""
    table = read_token_bytes(DEMO_FOLDER, llm.tokenizer.vocab_size)
    assert table is not None
    return table.pieces()


def require_legal(done: RequestOutput, automaton: ByteAutomaton, spelled: list[bytes], stop_ids: set[int]) -> str:
    """Assert that the automaton accepts the output, or a continuation of it. Returns why the output ended."""
    (out,) = done.outputs
    ids = list(out.token_ids)
    state = automaton.advance(automaton.start, b"".join(spelled[token] for token in ids))
    if state == DEAD and out.finish_reason == "stop" and ids[-1] in stop_ids:
        ids.pop()
        state = automaton.advance(automaton.start, b"".join(spelled[token] for token in ids))
    assert state != DEAD and all(spelled[token] for token in ids), out
    if out.finish_reason == "stop":
        assert automaton.may_end(state)
    else:
        assert out.finish_reason == "length" and not automaton.must_end(state)
    return str(out.finish_reason)


def string(least: int, most: int) -> dict[str, Any]:
    """A schema of strings."""
    return {"type": "string", "minLength": least, "maxLength": most}


def generate_legal_outputs(llm: LLM, rng: np.random.Generator, requests: int = 60) -> None:
    """Generate with more automata than the engine holds at a time, next to requests without a grammar; with penalties, filters
    and log probabilities."""
    sizes = zip(rng.integers(2, 40, 8).tolist(), rng.integers(2, 30, 8).tolist(), strict=True)
    automata = [random_automaton(rng, states=states, classes=classes, dead=0.7) for states, classes in sizes]
    for automaton in automata:  # no token has the last byte, so it must not be the only continuation
        automaton.class_of[255] = automaton.class_of[254]
    choices = [JSON, JSON[:-1] + b', "y": null}'], [b"yes", b"no", "vielleicht é".encode()]
    automata += [automaton_of_choices(some) for some in choices]
    lengths = [(2, 5), (0, 9), (7, 200_000)]
    automata += [automaton_of_schema({"type": "array", "items": string(*both), "maxItems": 3}) for both in lengths]
    params, chosen = [], []
    for i in range(requests):
        chosen.append(None if i % 5 == 4 else automata[int(rng.integers(len(automata)))])
        params.append(SamplingParams(
            max_tokens=int(rng.integers(5, 60)), seed=i, grammar=chosen[-1], temperature=float(rng.choice([0.0, 1.0, 5.0])),
            repetition_penalty=float(rng.choice([1.0, 1.4])), min_p=float(rng.choice([0.0, 0.05])), ignore_eos=bool(i % 3 == 0),
            logprobs=3 if i % 7 == 0 else None, min_tokens=int(rng.choice([0, 0, 5])),
        ))  # fmt: skip
    outputs = llm.generate([f"prompt {i}" for i in range(requests)], params)
    spelled, stop_ids = pieces(llm), set(llm.tokenizer.eos_ids)
    ends = {require_legal(o, a, spelled, stop_ids) for o, a in zip(outputs, chosen, strict=True) if a is not None}
    assert ends == {"stop", "length"}
