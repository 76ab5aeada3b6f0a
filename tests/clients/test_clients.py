"""Clients of other projects, unmodified: each gives what plain HTTP gives."""

import json
import subprocess
import sys
from pathlib import Path

import instructor
import langchain_openai
import litellm
import openai
import pytest

BIN = Path(sys.executable).parent
DEMO = Path(__file__).parents[2] / "blinkpy" / "models" / "demo"
TEXT = "Tell me a story."
ASK = [{"role": "user", "content": TEXT}]
TOKENS = 16  # litellm asks for no less


@pytest.fixture(scope="module")
def expected(served) -> str:
    return served.chat(TEXT, max_tokens=TOKENS)


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.base, api_key=served.key, max_retries=0) as client:
        yield client


# ---- openai ------------------------------------------------------------------------------------------------------------


def test_openai_chats(served, client, expected) -> None:
    fields = {"model": served.model, "messages": ASK, "max_tokens": TOKENS, "temperature": 0}
    assert client.chat.completions.create(**fields).choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == TOKENS
    stop = expected[len(expected) // 2 :].split()[0]
    with client.chat.completions.stream(**fields, stop=stop) as stream:
        assert stream.get_final_completion().choices[0].message.content == expected[: expected.index(stop)]


def test_openai_completions_responses_and_models(served, client, expected) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    text = client.completions.create(model=served.model, prompt="Once", max_tokens=5, temperature=0).choices[0].text
    assert text == served.post("/v1/completions", prompt="Once", max_tokens=5, temperature=0)["choices"][0]["text"]
    response = client.responses.create(model=served.model, input=TEXT, max_output_tokens=TOKENS, temperature=0)
    assert response.output_text == expected
    events = client.responses.create(model=served.model, input=TEXT, max_output_tokens=TOKENS, temperature=0, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected


def test_openai_errors(served, client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=served.model, messages=ASK, temperature=500)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.base, api_key="wrong", max_retries=0).models.list()


# ---- litellm -----------------------------------------------------------------------------------------------------------


def test_litellm(served, expected) -> None:
    server = {"api_base": served.base, "api_key": served.key}
    fields = {"model": f"openai/{served.model}", "messages": ASK, "max_tokens": TOKENS, "temperature": 0, **server}
    assert litellm.completion(**fields).choices[0].message.content == expected
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    text = litellm.text_completion(model=f"text-completion-openai/{served.model}", prompt="Once", max_tokens=5, **server)
    assert text.choices[0].text
    response = litellm.responses(model=f"openai/{served.model}", input=TEXT, max_output_tokens=TOKENS, temperature=0, **server)
    assert response.output[0].content[0].text == expected


def test_litellm_names_what_was_wrong(served) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model=f"openai/{served.model}", messages=ASK, temperature=500, api_base=served.base, api_key=served.key
        )


# ---- langchain, instructor, llm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(served, expected, responses) -> None:
    model = langchain_openai.ChatOpenAI(
        model=served.model,
        base_url=served.base,
        api_key=served.key,
        max_tokens=TOKENS,
        temperature=0,
        use_responses_api=responses,
    )
    assert model.invoke(TEXT).text == expected
    assert "".join(chunk.text for chunk in model.stream(TEXT)) == expected
    assert [answer.text for answer in model.batch([TEXT, TEXT])] == [expected] * 2
    usage = model.invoke(TEXT).usage_metadata
    assert usage["output_tokens"] == TOKENS
    assert "cache_read" in usage["input_token_details"], "not counted as of a paid tier"


def test_langchain_completions(served) -> None:
    model = langchain_openai.OpenAI(model=served.model, base_url=served.base, api_key=served.key, max_tokens=5, temperature=0)
    assert (
        model.invoke("Once") == served.post("/v1/completions", prompt="Once", max_tokens=5, temperature=0)["choices"][0]["text"]
    )


def test_instructor_without_a_model_of_the_answer(served, client, expected) -> None:
    """Its modes need structured output or tools; this is the client around them."""
    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    answer = patched.chat.completions.create(
        model=served.model, messages=ASK, response_model=None, max_tokens=TOKENS, temperature=0
    )
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize("options", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_llm(served, expected, tmp_path, options) -> None:
    models = [{"model_id": "blinkpy", "model_name": served.model, "api_base": served.base, "api_key_name": "blinkpy"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    limits = ["--key", served.key, "-o", "max_tokens", str(TOKENS), "-o", "temperature", "0"]
    command = [BIN / "llm", "-m", "blinkpy", TEXT, *limits, *options]
    environment = {"LLM_USER_PATH": str(tmp_path), "PATH": str(BIN)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.strip()


# ---- guidellm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(served, tmp_path, endpoint) -> None:
    report = tmp_path / "report.json"
    command = [
        *(BIN / "guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={served.url},api_key={served.key},request_format={endpoint}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=5"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == totals["total"] >= 3, totals
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 8
