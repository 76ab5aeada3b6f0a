"""Every published model at its real widths: two layers in each served form, through the real engine.

    python -m pytest tests/gpu/test_published_widths.py -n 12 -k small --junitxml=build/widths.xml
    python -m pytest tests/gpu/test_published_widths.py -n 3 -k large --junitxml=build/widths-large.xml
    python tools/write_published_widths.py build/widths.xml build/widths-large.xml

An engine serves prompts in steps of 1, 4 and 70 rows, a prompt of several chunks, and a prompt with most of its pages in the
prefix cache. Its log probabilities are compared with those of transformers in float32, with the checkpoint's values. Their error
may be LIMIT times that of transformers' own model with the rounding of this form.

With experts, a token may go to the other of two nearly equal experts, which affects all tokens after it. In a step of few rows
these can be most tokens. Such steps are drawn several times, and the nearest draw is judged: a wrong kernel is wrong in each
draw.
"""

import gc
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_serving import collect, config_for, serving
from support.models import published_widths
from support.models.published_widths import Form, Reference, Widths

from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.engine.engine import make_engine
from blinkpy.queues.request_parameters import RequestParameters

LIMIT = 1.5
LEAST = 2e-3
"""Smaller errors of a log probability count as this error: of bfloat16's last bits in logits."""
NEW = 6  # tokens of each request
LONG, BEHIND = 1100, 40  # tokens of a prompt of several chunks, and of the rest of a prompt that shares its pages
QUANTILES = (0.5, 0.75)  # of the tokens' errors
FEW = 100  # tokens
DRAWS = 4  # of steps of few rows, with experts
LARGE = 1_050_000_000
ORDER = ("w4a16", "nvfp4", "fp8", "fp8_blocks", "mxfp4", "bfloat16")  # the newest claims first, in case the time ends
CASES = sorted(
    ((each, form) for each in published_widths.published_widths() for form in each.forms),
    key=lambda case: ORDER.index(case[1].name),
)


def case_id(case: tuple[Widths, Form]) -> str:
    each, form = case
    cache = "-fp8cache" if form.kv_cache != "auto" else ""
    return f"{published_widths.label(each.names[0])}-{form.name}{cache}-{'large' if each.numbers > LARGE else 'small'}"


def served(pair: QueuePair, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Serve greedily: texts with their generated tokens, and the likeliest ids of each generated token with their log
    probabilities, [requests, NEW, TOP]."""
    asked = RequestParameters(max_tokens=NEW, temperature=0.0, logprobs=20)
    requests = [pair.submit(np.array(prompt, np.int32), asked) for prompt in prompts]
    answers = collect(pair, requests)
    records = np.array([list(request.records) for request in requests])  # [requests, NEW, 1 + TOP, 2]
    assert records.shape[1] == NEW
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    return texts, torch.from_numpy(records[:, :, 1:, 0].astype(np.int64)), torch.from_numpy(records[:, :, 1:, 1])


def errors(found: torch.Tensor, exact: torch.Tensor, *, experts: bool) -> np.ndarray:
    """Root mean square error of each token's log probabilities, at quantiles of the tokens.

    experts: a token may go to the other of two nearly equal experts, and then has a large error; of few tokens only the median
    counts.
    """
    assert bool(found.isfinite().all())
    each = (found.double() - exact.double()).pow(2).mean(-1).sqrt().flatten()
    return np.quantile(each.cpu().numpy(), QUANTILES[:1] if experts and len(each) < FEW else QUANTILES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_published_widths(rng: np.random.Generator, tmp_path: Path, case: tuple[Widths, Form], record_property: Any) -> None:
    compare(rng, tmp_path, case, record_property, "cuda")


def compare(
    rng: np.random.Generator, tmp_path: Path, case: tuple[Widths, Form], record_property: Callable[[str, str], None], device: str
) -> None:
    each, form = case
    for key, value in {"models": " ".join(each.names), "form": form.name, "kv_cache": form.kv_cache}.items():
        record_property(key, value)
    model = published_widths.make_model(each, int(rng.integers(2**31)), device)
    published_widths.save(model, each, tmp_path, form)
    model.cpu()  # many of these tests share a GPU
    torch.cuda.empty_cache()
    config = config_for(
        tmp_path, device=device, quantization=form.quantization, kv_cache_dtype=form.kv_cache, max_num_seqs=80, slots=128,
        num_pages=1024, max_model_len=1280, max_num_batched_tokens=512,
    )  # fmt: skip

    def some(count: int, length: int) -> list[list[int]]:
        return rng.integers(0, published_widths.VOCAB, (count, length)).tolist()

    experts = any(each.config.get(key) for key in published_widths.EXPERTS)
    batches = [("70 rows", some(70, 20))]
    for _ in range(DRAWS if experts else 1):
        long = some(1, LONG)
        shared = [[*long[0], *some(1, BEHIND)[0]]]
        batches += [("1 row", long), ("1 row, prefix hit", shared), ("4 rows", some(4, 33))]
    with serving(make_engine(config)) as pair:
        answers = [(rows, served(pair, prompts)) for rows, prompts in batches]
    shutil.rmtree(tmp_path)  # together they would fill a disk
    gc.collect()
    reference = Reference(model.to(device), form)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for rows, (texts, ids, values) in answers:
        prompt = len(texts[0]) - NEW
        assert bool(((ids >= 0) & (ids < published_widths.VOCAB)).all()), f"{rows}: no tokens, as with infinite logits"
        exact, narrow, rounded = (log_probabilities.cpu().gather(2, ids) for log_probabilities in reference.three(texts, prompt))
        of = partial(errors, exact=exact, experts=experts)
        ours, allowed = of(values), np.hypot(of(narrow), of(rounded))
        ratio = float((ours / np.maximum(allowed, LEAST)).max())
        print(f"{case_id(case)}, {rows}: error {ours[0]:.4f}, by rounding alone {allowed[0]:.4f}, ratio {ratio:.2f}")
        found.setdefault(rows, []).append((ratio, ours[0], errors(values, rounded, experts=False)[0]))
        spread = float(exact.std())
        assert spread > 0.1, "the logits are too flat to show an error"
    for rows, draws in found.items():
        ratio, error, beside = min(draws)
        record_property(f"error, {rows}", f"{error:.5f}")
        record_property(f"ratio, {rows}", f"{ratio:.3f}")
        record_property(f"error beside the same roundings, {rows}", f"{beside:.5f}")
    assert max(min(draws) for draws in found.values())[0] <= LIMIT
