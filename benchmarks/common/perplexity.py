"""How well a served model predicts a text that it has not read: to compare types of weights and of the KV cache."""

import math
from pathlib import Path
from typing import Any

from blinkpy import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
WINDOW = 512  # tokens that are scored together, the first of them given
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


def held_out_text() -> str:
    """This project's guides: English that the demonstration model has not read."""
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def perplexity(model: str, text: str, tokens: int, **options: Any) -> float:
    """exp of the mean negative log probability of the text's first `tokens` tokens, in windows. options: of the engine."""
    with LLM(model, **{"max_model_len": WINDOW + 1, **options}) as llm:
        ids = llm.tokenizer.encode(text).tolist()[:tokens]
        windows = [ids[first : first + WINDOW] for first in range(0, len(ids) - 1, WINDOW)]
        outputs = llm.generate(windows, SAMPLING)
    losses = []
    for window, output in zip(windows, outputs, strict=True):
        for token, found in zip(window, output.prompt_logprobs or [], strict=True):
            if found is not None:
                losses.append(-found[token].logprob)
    return math.exp(sum(losses) / len(losses))
