"""Log probabilities from the CPU engine through HTTP, against transformers' logits for the same tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from support.engine_serving import running
from support.front_end.http_server import MODEL, serving

from blinkpy.config import Config
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.engine import make_engine
from blinkpy.models.weights.model_folder import DEMO_FOLDER

TOLERANCE = 1e-3  # of two float32 forward passes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_FOLDER)


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Token ids by the names that answers give them: the demonstration model's vocabulary spells each id differently."""
    spelled = [tokenizer.spell(token) for token in range(tokenizer.vocab_size)]
    names = [text if text.encode() == piece else f"bytes:{text}" for text, piece in spelled]
    return {name: token for token, name in enumerate(names)}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    options = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "name": f"test-{secrets.token_hex(6)}"}
    limits = {"max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    engine = make_engine(Config().with_options({**options, **limits}))
    engine.start()
    with running(engine), serving(engine.config.engine.name, DEMO_FOLDER) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def log_softmax(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """What transformers says of each token after the prompt and the tokens before it, float64 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])[:, :-1]).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.double(), -1)


def compare(expected: torch.Tensor, tokens: list[int], own: list[float], top: list[list[float]], count: int) -> None:
    """Of each token its own log probability, and the `count` largest in order."""
    np.testing.assert_allclose(own, expected[torch.arange(len(tokens)), tokens], atol=TOLERANCE)
    np.testing.assert_allclose(top, expected.topk(count).values, atol=TOLERANCE)


def test_prompts_in_one_batch(
    client: openai.OpenAI, model: torch.nn.Module, ids: dict[str, int], rng: np.random.Generator
) -> None:
    """Chunked prompts that share pages, greedy and sampled with penalties: always the model's own distribution."""
    start = rng.integers(6, 4096, 20).tolist()
    prompts = [[*start, *rng.integers(6, 4096, int(n)).tolist()] for n in rng.integers(1, 60, 6)]
    for more in ({"temperature": 0}, {"temperature": 1.4, "seed": 3, "presence_penalty": 1.5, "top_p": 0.9}):
        extra: dict[str, Any] = {"repetition_penalty": 1.3, "ignore_eos": True}
        body = client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=16, logprobs=20, extra_body=extra if more["temperature"] else {}, **more
        )
        for prompt, choice in zip(prompts, body.choices, strict=True):
            logprobs = choice.logprobs
            assert logprobs is not None
            assert logprobs.tokens is not None
            assert logprobs.top_logprobs is not None
            tokens = [ids[name] for name in logprobs.tokens]
            top = [sorted(table.values(), reverse=True)[:20] for table in logprobs.top_logprobs]
            expected = log_softmax(model, prompt, tokens)
            compare(expected, tokens, logprobs.token_logprobs or [], top, 20)
            for place, table in zip(expected, logprobs.top_logprobs, strict=True):
                for name, value in table.items():
                    assert abs(place[ids[name]] - value) < TOLERANCE


def test_chat_streamed(client: openai.OpenAI, model: torch.nn.Module, tokenizer: Tokenizer, ids: dict[str, int]) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    kwargs: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    whole = client.chat.completions.create(temperature=0.9, seed=5, **kwargs).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    stream = client.chat.completions.create(temperature=0.9, seed=5, stream=True, **kwargs)
    parts = [event.choices[0].logprobs for event in stream if event.choices]
    streamed = [entry for part in parts if part is not None for entry in part.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    np.testing.assert_allclose([e.logprob for e in streamed], [e.logprob for e in content], atol=TOLERANCE)
    template = load_template(DEMO_FOLDER, tokenizer.config, "", 1 << 16)
    assert template is not None
    prompt = tokenizer.encode(template.render(messages), add_special_tokens=False).tolist()
    tokens = [ids[entry.token] for entry in content]
    top = [[other.logprob for other in entry.top_logprobs] for entry in content]
    compare(log_softmax(model, prompt, tokens), tokens, [entry.logprob for entry in content], top, 5)


def test_stop_ids_do_not_come_before_min_tokens(
    client: openai.OpenAI, model: torch.nn.Module, tokenizer: Tokenizer, ids: dict[str, int]
) -> None:
    """Greedy, with a stop id that the model wants at once: the likeliest other token takes its place, then it ends."""
    prompt = tokenizer.encode("It was a dark and").tolist()
    wanted = int(log_softmax(model, prompt, [0])[0].argmax())
    extra = {"stop_token_ids": [wanted], "min_tokens": 3}
    body = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0, logprobs=1, extra_body=extra)
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    tokens = [ids[name] for name in logprobs.tokens or []]
    expected = log_softmax(model, prompt, tokens)
    assert wanted not in tokens[:3]
    assert tokens[0] == int(expected[0].topk(2).indices[1])
    assert (logprobs.top_logprobs or [])[0][tokenizer.spell(wanted)[0]] > (logprobs.token_logprobs or [])[0]
    at_once = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0, extra_body={"stop_token_ids": [wanted]}
    )
    assert at_once.usage is not None
    assert (at_once.choices[0].finish_reason, at_once.usage.completion_tokens) == ("stop", 1)
