"""Names of other servers and services: each error says what to use here, and values that OpenAI documents are taken."""

import re
from typing import Any

import orjson
import pytest

from blinkpy.cli import make_parser
from blinkpy.config import Config, ConfigError, meant, option_type, options
from blinkpy.config.peer_options import PEER_OPTIONS
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.fields.body_model import declared
from blinkpy.dpu.http.fields.chat_fields import ChatBody, parse_chat
from blinkpy.dpu.http.fields.completion_fields import CompletionBody
from blinkpy.dpu.http.fields.peer_fields import PEER_FIELDS
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.queues.request_parameters import RequestParameters

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> Any:
    return parse_chat(orjson.dumps({"messages": [USER], **fields}), RequestParameters())


def response(**fields: Any) -> Any:
    return parse_response(orjson.dumps({"input": "Hi", **fields}), RequestParameters())


def test_every_field_of_the_table_is_answered_by_it() -> None:
    known = set(declared(ChatBody)) | set(declared(CompletionBody))
    assert not known & set(PEER_FIELDS), "these exist here"
    for name, advice in PEER_FIELDS.items():
        with pytest.raises(ApiError) as refused:
            chat(**{name: 1})
        assert refused.value.message == f"unknown field '{name}'; {advice}."
        named = [word.strip("'") for word in advice.split() if word.startswith("'") and word.endswith("'")]
        assert all(word in known or word.startswith("--") or word == "system" for word in named), advice


def test_every_option_of_the_table_is_answered_by_it() -> None:
    known = {item.name.replace("_", "-"): item for _, item in options()}
    assert not set(known) & set(PEER_OPTIONS), "these exist here"
    for name, advice in PEER_OPTIONS.items():
        for spelling in (f"--{name}", name.replace("-", "_")):
            assert meant(spelling, known) == f": {advice}"
        for phrase in re.findall("'(--[^']*)'", advice):
            option, *values = phrase.split()
            item = known[option.removeprefix("--").removeprefix("no-")]
            example = [] if option_type(item) is bool else [str(item.default)]
            assert item.name in make_parser().parse(["serve", "demo", option, *(values or example)]), advice


def test_values_that_openai_documents() -> None:
    for summary in ("auto", "concise", "detailed"):
        assert response(reasoning={"effort": "low", "summary": summary}).reasoning_effort == "low"
    for verbosity in ("low", "medium", "high"):
        assert response(text={"verbosity": verbosity}).verbosity == chat(verbosity=verbosity).verbosity == verbosity
    for kept in ("24h", "in_memory", "in-memory"):
        response(prompt_cache_retention=kept), chat(prompt_cache_retention=kept)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"type": "json_object", "schema": schema}
    for request in (chat(response_format=given), response(text={"format": given})):
        assert request.grammar.grammar == {"schema": schema}
    for wrong in ({"reasoning": {"summary": "long"}}, {"text": {"verbosity": "max"}}, {"prompt_cache_retention": "48h"}):
        with pytest.raises(ApiError):
            response(**wrong)


def test_options_by_name_get_the_same_advice() -> None:
    with pytest.raises(ConfigError, match="split only by '--tensor-parallel-size'"):
        Config().with_options({"pipeline_parallel_size": 2})
