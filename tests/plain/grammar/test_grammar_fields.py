"""From a request's fields to the automaton in its submission, over HTTP, with an engine in plain Python."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.compiled_grammars import automaton_of_regex, automaton_of_schema, automaton_of_texts
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.http_server import RunningServer, serving
from support.front_end.tiny_tokenizer import write_model

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.queues.byte_automaton import ByteAutomaton

EBNF = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    words = 1 << 16  # of the largest automaton
    facts = FACTS._replace(grammar_share=2, grammar_words=words, grammar_arena=2 * words)
    sizes = SIZES.__class__(**{**SIZES.__dict__, "prompt_tokens": 4 * words})
    with (
        FakeEngine(sizes=sizes, facts=facts) as engine,
        serving(engine, write_model(tmp_path_factory.mktemp("model")), grammar_compile_ms=5000) as server,
    ):
        yield server


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[ByteAutomaton | None]:
    """The grammars of submissions."""
    found: list[ByteAutomaton | None] = []
    submit = QueuePair.submit

    def spy(pair: QueuePair, *arguments: Any, grammar: ByteAutomaton | None = None) -> Any:
        found.append(grammar)
        return submit(pair, *arguments)

    monkeypatch.setattr(QueuePair, "submit", spy)
    return found


def as_openai(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


ACCEPTED = [
    (as_openai(SCHEMA), automaton_of_schema(SCHEMA)),
    (as_openai(SCHEMA, strict=True, description="what instructor and langchain send"), automaton_of_schema(SCHEMA)),
    (as_openai(SCHEMA, strict=None), automaton_of_schema(SCHEMA)),
    ({"response_format": {"type": "json_object"}}, automaton_of_grammar({"object": True})),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, automaton_of_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, automaton_of_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "[0-9]+"}}, automaton_of_regex("[0-9]+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, automaton_of_texts(["yes", "no"])),
    ({"structured_outputs": {"json_object": True}}, automaton_of_grammar({"object": True})),
    ({"structured_outputs": {}}, None),
    ({"guided_json": SCHEMA}, automaton_of_schema(SCHEMA)),
    ({"guided_regex": "a|b"}, automaton_of_regex("a|b")),
    ({"guided_choice": ["yes", "no"]}, automaton_of_texts(["yes", "no"])),
    ({}, None),
]


@pytest.mark.parametrize(("fields", "automaton"), ACCEPTED, ids=lambda value: str(value)[:40])
def test_the_automaton_is_in_each_submission(
    server: RunningServer, submitted: list[ByteAutomaton | None], fields: dict[str, Any], automaton: ByteAutomaton | None
) -> None:
    assert server.chat(max_tokens=2, n=2, **fields).status_code == 200
    assert server.complete(max_tokens=2, **fields).status_code == 200
    wanted = None if automaton is None else automaton.digest
    assert [None if grammar is None else grammar.digest for grammar in submitted] == [wanted] * 3


REFUSED = [
    (as_openai({"properties": {"a": {"uniqueItems": True}}}), "response_format.json_schema.schema", "#/properties/a"),
    (as_openai({"type": "integer", "minimum": 2, "maximum": 1}), "response_format.json_schema.schema", "contradict"),
    (
        as_openai({"type": "string", "minLength": 600_000}),
        "response_format.json_schema.schema",
        "'minLength' must be at most 524,288",
    ),
    (
        as_openai({"type": "string", "minLength": 10_000, "pattern": "^(ab)*$"}),
        "response_format.json_schema.schema",
        "'minLength' is 10000, but may be at most 2000 with this 'pattern'",
    ),
    (as_openai({"type": "array", "minItems": 1000}), "response_format.json_schema.schema", "too many states"),
    (as_openai([]), "response_format.json_schema.schema", "must be a JSON Schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (as_openai(SCHEMA, name=""), "response_format.json_schema.name", "1 to 64"),
    (as_openai(SCHEMA, strict="yes"), "response_format.json_schema.strict", "boolean"),
    (as_openai(SCHEMA, other=1), "response_format.json_schema.other", "known fields: name, schema, strict, description."),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "known fields: type."),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"structured_outputs": {"grammar": EBNF}}, "structured_outputs.grammar", "use a JSON Schema or a regular expression"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "use a JSON Schema or a regular expression"),
    ({"guided_grammar": EBNF}, "guided_grammar", "use a JSON Schema or a regular expression"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "must have only one of"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must hold 1 to 10000 entries, not 0"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "boolean"),
    ({"guided_regex": "("}, "guided_regex", "missing"),
    ({"guided_choice": [1]}, "guided_choice", "must be a string, not an integer"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "contradict"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_constraints_get_a_400_that_names_them(
    server: RunningServer, fields: dict[str, Any], param: str, message: str
) -> None:
    for response in (server.chat(**fields), server.complete(**fields)):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert message in error["message"]


def test_grammars_refused_by_the_engine_get_a_400(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise ValueError("the engine does not support grammars")

    monkeypatch.setattr(QueuePair, "submit", refuse)
    error = server.complete(guided_regex="a").json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "invalid_grammar")
    assert "does not support grammars" in error["message"]
    server.idle()


def test_an_exploding_grammar_delays_no_other_request(server: RunningServer, submitted: list[ByteAutomaton | None]) -> None:
    """Others are answered while it is compiled, and it ends with a 400; with a 429 if the machine is too busy to compile it."""
    answers: dict[int, int] = {}
    exploding = [{"guided_regex": f"(a|b)*a(a|b){{1{i}}}(a|b)*c" + "(x|y)*x(x|y){15}"} for i in range(6)]

    def ask(number: int) -> None:
        answers[number] = server.complete(**exploding[number]).status_code

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(exploding))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.complete(max_tokens=2).status_code == 200
    for thread in threads:
        thread.join()
    assert len(answers) == len(exploding) and set(answers.values()) <= {400, 429}
    for number in [number for number, status in answers.items() if status == 429]:
        ask(number)  # alone
    assert set(answers.values()) == {400}
    assert server.chat(max_tokens=2, **as_openai(SCHEMA)).status_code == 200


def test_a_grammar_beyond_the_engines_limit_names_field_and_option(server: RunningServer) -> None:
    text = {"type": "string", "maxLength": 2000, "pattern": "^(ab|cd)*$"}
    schema = {"properties": {"a": {"type": "integer"}, "texts": {"type": "array", "items": text, "maxItems": 5}}}
    error = server.complete(guided_json=schema).json()["error"]
    assert error["param"] == "guided_json"
    assert "--grammar-kib" in error["message"] and "'maxLength'" in error["message"]
    assert error["message"].endswith("At #/properties/texts/items.")
    server.idle()
