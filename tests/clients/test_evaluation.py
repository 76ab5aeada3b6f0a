"""Load generators and evaluations in addition to guidellm: aiperf, the shapes of `vllm bench serve`, lm-eval."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BIN = Path(sys.executable).parent
DEMO = Path(__file__).parents[2] / "blinkpy" / "models" / "demo"
REQUESTS, TOKENS = 6, 8


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf(served: Any, tmp_path: Path, endpoint: str) -> None:
    command = [
        *(BIN / "aiperf", "profile", "--model", served.model, "--url", served.url, "--api-key", served.key, "--ui", "none"),
        *("--endpoint-type", endpoint, "--streaming", "--request-count", str(REQUESTS), "--concurrency", "2"),
        *("--tokenizer", DEMO, "--prompt-input-tokens-mean", "20", "--output-tokens-mean", str(TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", tmp_path),
    ]
    if endpoint != "responses":  # of these it reads the usage of complete ones alone, and these end by max_output_tokens
        command.append("--use-server-token-count")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # with it, it knows no folders
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["output_sequence_length"]["avg"] == pytest.approx(TOKENS, abs=1 if endpoint == "responses" else 0)
    assert not report.get("error_summary")


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_shapes_of_vllm_bench_serve(served: Any, chat: bool) -> None:
    """vLLM needs a GPU's packages, so the test sends the requests of its benchmark and reads the events as it does."""
    common = {"model": served.model, "stream": True, "stream_options": {"include_usage": True}}
    common |= {"ignore_eos": True, "temperature": 0.0}
    if chat:
        messages = [{"role": "user", "content": [{"type": "text", "text": "Once"}]}]
        path, body = "chat/completions", {**common, "messages": messages, "max_completion_tokens": TOKENS}
    else:
        own = {"prompt": "Once", "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None}
        path, body = "completions", {**common, **own}
    headers = {"Authorization": f"Bearer {served.key}", "x-request-id": "bench-1"}
    text, chunks, usage = "", 0, None
    with httpx.stream("POST", f"{served.base}/{path}", json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                chunks += 1
                text += (event["choices"][0]["delta"].get("content") if chat else event["choices"][0]["text"]) or ""
            else:
                usage = event["usage"]
    assert usage is not None
    assert usage["completion_tokens"] == TOKENS
    assert 1 < chunks <= TOKENS + 1  # the last one has the reason alone
    assert usage["prompt_tokens"] > 0
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    whole = served.post(f"/v1/{path}", **plain)["choices"][0]
    assert text == (whole["message"]["content"] if chat else whole["text"])


# ---- lm-eval -------------------------------------------------------------------------------------------------------------

GENERATE = """
task: blinkpy_generate
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: blinkpy_choose
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def evaluate(served: Any, folder: Path, task: str, documents: list[dict[str, Any]], name: str) -> Any:
    """The results of lm-eval, with its samples. name: its name for the kind of model."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "task.yaml").write_text(task.replace("DATA", str(data)))
    chat = name == "local-chat-completions"
    url = f"{served.base}/chat/completions" if chat else f"{served.base}/completions"
    arguments = f"model={served.model},base_url={url},num_concurrent=2,max_retries=1,tokenizer_backend=huggingface"
    arguments += f",tokenizer={DEMO}"
    command = [BIN / "lm_eval", "run", "--model", name, "--model_args", arguments, "--include_path", folder, "--log_samples"]
    command += ["--tasks", task.split()[1], "--output_path", folder / "out", *(["--apply_chat_template"] if chat else [])]
    environment = {**os.environ, "OPENAI_API_KEY": served.key, "HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = next((folder / "out").rglob("samples_*.jsonl")).read_text()
    return sorted((json.loads(line) for line in samples.splitlines()), key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_lm_eval_generates(served: Any, tmp_path: Path, name: str) -> None:
    questions = ["It was a dark", "The ship"]
    found = evaluate(served, tmp_path, GENERATE, [{"question": one, "answer": "x"} for one in questions], name)
    for sample, question in zip(found, questions, strict=True):
        if name == "local-completions":
            ids = AutoTokenizer.from_pretrained(DEMO)(question, add_special_tokens=False).input_ids  # as it sends them
            fields = {"prompt": ids, "max_tokens": 8, "temperature": 0, "stop": "\n\n"}
            expected = served.post("/v1/completions", **fields)["choices"][0]["text"]
        else:
            expected = served.chat(question, max_tokens=8, stop="\n\n")
        assert sample["resps"][0][0] == expected


def test_lm_eval_chooses(served: Any, tmp_path: Path) -> None:
    """Log probabilities of a prompt: `echo` with `logprobs`, `max_tokens` 1. The likelier of two ends has to be chosen."""
    documents = [
        {"question": "Once upon a time there", "choices": ["was", "xylophone"], "answer": 0},
        {"question": "He said that he did not", "choices": ["qqq zzz", "know"], "answer": 1},
    ]
    for sample in evaluate(served, tmp_path, CHOOSE, documents, "local-completions"):
        logprobs = [float(one[0][0]) for one in sample["resps"]]
        for choice, logprob in zip(sample["doc"]["choices"], logprobs, strict=True):
            assert logprob == pytest.approx(log_likelihood(sample["doc"]["question"], f" {choice}"), abs=1e-3)
        assert sample["acc"] == 1.0, sample


def log_likelihood(context: str, continuation: str) -> float:
    """By transformers, of the same weights."""
    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids, before = (tokenizer(text, add_special_tokens=False).input_ids for text in (context + continuation, context))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return float(sum(logprobs[at - 1, ids[at]] for at in range(len(before), len(ids))))
