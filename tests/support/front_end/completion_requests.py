"""Random requests for completions, and the contents of their answers, to compare two paths to the same engine."""

import json

import httpx
import numpy as np

WORDS = ["whale", "sea", "harpoon", "London", "fog", "lamp", "garden", "letter", "captain", "winter"]


def requests(rng: np.random.Generator, count: int, words: int, tokens: int) -> list[dict]:
    """Bodies of completion requests with random lengths, sampling and log probabilities. words: prompts have fewer; tokens:
    maximum tokens of an answer."""
    made = []
    for i in range(count):
        body = {
            "model": "demo",
            "prompt": " ".join(rng.choice(WORDS, int(rng.integers(1, words)))),
            "max_tokens": int(rng.integers(1, tokens + 1)),
            "temperature": float(rng.choice([0.0, 0.8])),
            "seed": int(rng.integers(0, 2**31)),
            "stream": bool(i % 2),
        }
        if i % 3 == 0:
            body["logprobs"] = int(rng.integers(0, 6))
        made.append(body)
    return made


def said(answer: httpx.Response) -> list[object]:
    """The contents of an answer, without ids and times."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in answer.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    logprobs = [value for c in choices if c["logprobs"] for value in zip(*c["logprobs"].values(), strict=True)]
    return ["".join(c["text"] for c in choices), logprobs, choices[-1]["finish_reason"]]
