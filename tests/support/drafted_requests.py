"""Requests that get drafts, and their outputs from an engine."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.automata import random_automaton
from support.compiled_grammars import automaton_of_schema
from support.engine_serving import ROUNDING, collect, config_for, serving
from support.models import model_zoo
from support.waiting import wait_for

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.call_grammar import forced_calls
from blinkpy.engine.engine import make_engine
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, GAUGE

NGRAM = {"speculative": "ngram", "speculative_tokens": 5, "speculative_match": 3}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 0.02, "max_tokens": 60},  # long enough to repeat a token
    {"temperature": 0.4, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logprobs": 4},
    {"temperature": 0.3, "min_tokens": 20},
)


@dataclass(frozen=True, eq=False)
class Output:
    """Tokens, FINISH_*, and the log probabilities of each token, largest first. Equal outputs have the same tokens, and log
    probabilities that differ only by rounding, so nearly equal ones may belong to other tokens."""

    tokens: list[int]
    finish: int
    scores: list[list[float]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Output) or (self.tokens, self.finish) != (other.tokens, other.finish):
            return False
        return np.shape(self.scores) == np.shape(other.scores) and np.allclose(self.scores, other.scores, rtol=0, atol=ROUNDING)


DraftedRequest = tuple[list[int], RequestParameters] | tuple[list[int], RequestParameters, ByteAutomaton]


def requests_of(rng: np.random.Generator) -> list[DraftedRequest]:
    """Requests with repetitive prompts, some with the same start; outputs of small models soon become repetitive, too."""
    made, stem = list[DraftedRequest](), rng.integers(6, model_zoo.VOCAB, 20).tolist()
    for i in range(2 * len(SAMPLINGS)):
        phrase = rng.integers(6, model_zoo.VOCAB, int(rng.integers(2, 9))).tolist()
        sampling = RequestParameters(**{"max_tokens": int(rng.integers(1, 90)), "seed": i} | SAMPLINGS[i % len(SAMPLINGS)])
        if sampling.min_tokens:
            sampling = sampling.changed(max_tokens=60, stop_ids=tuple(rng.integers(0, model_zoo.VOCAB, 8).tolist()))
        made.append((stem[: 20 * (i % 2)] + phrase * 4, sampling))
    return made


def grammars_of(rng: np.random.Generator) -> list[ByteAutomaton]:
    """Grammars with repetitive outputs: schemas, strict tools, counted strings, and random automata."""
    short = {"type": "string", "minLength": 2, "maxLength": int(rng.integers(3, 6))}
    item: dict[str, Any] = {
        "type": "object",
        "properties": {"name": short, "kind": {"enum": ["first", "second"]}, "ok": {"type": "boolean"}},
    }
    item |= {"required": ["name", "kind", "ok"], "additionalProperties": False}
    arrays = [item, short, {"enum": ["alpha", "alphabet"]}, {"type": "string", "minLength": 7}]
    made = [automaton_of_schema({"type": "array", "items": of, "minItems": 4}) for of in arrays]
    tools = [Tool("weather", item, True, {}), Tool("weather_of_day", {"type": "object", "properties": {}}, True, {})]
    made += [automaton_of_grammar(forced_calls(call_formats()["hermes"], some, True).grammar) for some in (tools, tools[:1])]
    return made + [random_automaton(rng, states=int(rng.integers(2, 9)), classes=3, dead=0.5) for _ in range(2)]


def constrained_requests(rng: np.random.Generator, folder: Path) -> list[DraftedRequest]:
    """Requests with a grammar, for a model without a tokenizer, which gets the bytes of the demonstration model's tokens. Some
    end at max_tokens, some by a stop id; some are of the other class."""
    shutil.copy(DEMO_FOLDER / "tokenizer.json", folder)
    made, grammars = list[DraftedRequest](), grammars_of(rng)
    for i, (prompt, sampling, *_) in enumerate(requests_of(rng) + requests_of(rng)):
        stops = {"stop_ids": (1, *[-1] * 7)} if i % 3 else {}
        least = int(rng.integers(0, 30)) if i % 4 == 0 else 0
        changed = sampling.changed(
            max_tokens=int(rng.integers(10, 110)), min_tokens=least, seed=i, best_effort=int(i % 5 == 0), **stops
        )
        made.append((prompt, changed, grammars[i % len(grammars)]))
    return made


def predictions_of(rng: np.random.Generator, outputs: list[Output]) -> dict[int, list[int]]:
    """Predictions for four of five requests, by their index: of their outputs, of outputs with edits, and of other tokens."""
    return {i: _predicted(rng, output.tokens, i % 4) for i, output in enumerate(outputs) if i % 5}


def _predicted(rng: np.random.Generator, output: list[int], kind: int) -> list[int]:
    """The output, the output with about one edit in 8 tokens, its second half, or random tokens."""
    if kind == 0:
        return output
    if kind == 1:
        edits = [([token], [], [token, token], [6])[int(rng.integers(0, 4)) if rng.random() < 0.125 else 0] for token in output]
        return [token for edit in edits for token in edit]
    return output[len(output) // 2 :] if kind == 2 else rng.integers(6, model_zoo.VOCAB, 40).tolist()


def outputs(
    folder: Path,
    requests: list[DraftedRequest],
    cancel_after: dict[int, int] | None = None,
    predictions: dict[int, list[int]] | None = None,
    **options: Any,
) -> tuple[list[Output], dict[str, int]]:
    """The output of each request, and the engine's counters. cancel_after: tokens after which to cancel some requests.
    predictions: predictions for some requests.
    """
    engine, predicted = make_engine(config_for(folder, **options)), [(predictions or {}).get(i) for i in range(len(requests))]
    with serving(engine) as client:
        words = engine.views.engine
        given = [{"prediction": np.array(tokens, np.int32)} if tokens else {} for tokens in predicted]
        sent = [
            client.submit(np.array(prompt, np.int32), sampling, None, *own, **more)
            for (prompt, sampling, *own), more in zip(requests, given, strict=True)
        ]
        ended = collect(client, sent, {sent[i]: count for i, count in (cancel_after or {}).items()})
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)
        counters = {name: int(words[index]) for name, index in COUNTER.items()}
    scores = [[[float(value) for _, value in record] for record in one.records] for one in sent]
    return [Output(*end, own) for end, own in zip(ended, scores, strict=True)], counters
