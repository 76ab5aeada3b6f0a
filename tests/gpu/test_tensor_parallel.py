"""`blinkpy serve --tensor-parallel-size 2` over HTTP: the same texts as on one GPU, a stream, and an end by a signal.

Supports claim ranks/results.
"""

import re
import signal

import httpx
import pytest
import torch
from support.commands import Command

PROMPTS = ["It was", "The family of", "She said that", "Mr. ", "In the morning", "My dear", "He", "There was no"]
START_S = 200.0


def texts_of(*options: str) -> list[str]:
    """Greedy answers of the demonstration model in float32, each alone and all together."""
    server = Command("serve", "demo", "--port", "0", "--device", "cuda", "--dtype", "float32", "--num-pages", "2048", *options)
    try:
        url = server.find(re.compile(r"on (http://\S+) "), START_S)[1]
        body = {"model": "demo", "max_tokens": 48, "temperature": 0}
        together = httpx.post(f"{url}/v1/completions", json={**body, "prompt": PROMPTS}, timeout=60).json()["choices"]
        alone = [httpx.post(f"{url}/v1/completions", json={**body, "prompt": one}, timeout=60).json() for one in PROMPTS[:2]]
        texts = [each["text"] for each in together]
        assert [each["choices"][0]["text"] for each in alone] == texts[:2]
        streamed = {**body, "prompt": PROMPTS[0], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as answer:
            assert sum(line.startswith("data: {") for line in answer.iter_lines()) > 5
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, "".join(server.said)
        return texts
    finally:
        server.kill()


@pytest.mark.timeout(300)
def test_two_gpus_give_the_texts_of_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: the steps of two ranks over HTTP were not made to share one")
    assert texts_of("--tensor-parallel-size", "2") == texts_of()
