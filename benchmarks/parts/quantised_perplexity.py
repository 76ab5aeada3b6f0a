"""What FP8 weights cost the demonstration model: its perplexity on a novel that it was not trained on, with and without.

The model reads the text in windows of as many tokens, each behind the token that begins a text, and predicts every token from
those before it in the window; the perplexity is the exponential of the mean loss. By torch on the CPU, in bfloat16 and in
float32; FP8 is what --quantization fp8 makes: a scale for each row of a weight, and one for each input. worse: the ratio of the
perplexities, less 1, of the same dtype; low and high: its 95 % interval, from the mean and the spread of the windows'
differences.
"""

import math
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.common.harness import ROOT, Flag, Run, check, run_benchmark
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.families.describe_model import describe_model
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import load_weights
from blinkpy.models.weights.model_folder import DEMO_FOLDER

TEXT = ROOT / "benchmarks" / "data" / "sense_and_sensibility.txt"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS = {"unquantised": "auto", "fp8": "fp8"}
WINDOW, TOGETHER, PAGE = 256, 4, 16  # tokens of a window with its beginning, windows of a step
WORSE = 0.01


def windows_of(most: int) -> NDArray[np.int64]:
    """Token ids of the text, [windows, WINDOW]. most: windows, at most."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids)
    count = min(most, len(ids) // (WINDOW - 1)) // TOGETHER * TOGETHER
    begin = np.full((count, 1), tokenizer.token_to_id("<|begin|>"))
    return np.concatenate([begin, ids[: count * (WINDOW - 1)].reshape(count, -1)], 1)


def losses(windows: NDArray[np.int64], dtype: torch.dtype, quantization: str, run: Run) -> NDArray[np.float64]:
    """Mean loss of each window, nats for a token."""
    sys.path.append(str(ROOT / "tests"))
    from support.models.paged_batch import PagedBatches  # type: ignore[import-not-found,unused-ignore]

    model = describe_model(DEMO_FOLDER, quantization)
    weights = load_weights(model, DEMO_FOLDER, dtype)
    pages, found = TOGETHER * WINDOW // PAGE, list[float]()
    for first in range(0, len(windows), TOGETHER):
        run.progress(f"{dtype}, {quantization}", first, len(windows))
        some = windows[first : first + TOGETHER]
        batches = PagedBatches(
            np.random.default_rng(1), page_size=PAGE, num_pages=pages, slots=TOGETHER, max_model_len=WINDOW,
            max_tokens=TOGETHER * WINDOW, max_rows=TOGETHER,
        )  # fmt: skip
        decoder = TorchDecoder(model, weights, PagedCache(model, pages, PAGE, dtype), WINDOW, TOGETHER * WINDOW)
        rows = [batches.add(window.tolist()) for window in some]
        batch = batches.batch([(row, WINDOW) for row in rows])
        logits = decoder.logits(decoder.forward(batch, batches.requests.page_table)).view(TOGETHER, WINDOW, -1)
        for number, row in enumerate(batches.rows):
            wanted = torch.tensor(row.tokens[1:WINDOW])
            found.append(float(torch.nn.functional.cross_entropy(logits[number, :-1].double(), wanted)))
    return np.array(found)


def benchmark(run: Run) -> None:
    windows, results = windows_of(run.options.windows), dict[str, Any]()
    for name, dtype in DTYPES.items():
        plain, fp8 = (losses(windows, dtype, quantization, run) for quantization in KINDS.values())
        check(bool(np.isfinite(plain).all() and plain.mean() < 5), "the model can't read")
        check(not np.array_equal(plain, fp8), "nothing was quantised")
        difference = fp8 - plain
        half = 1.96 * float(difference.std(ddof=1)) / math.sqrt(len(difference))
        mean = float(difference.mean())
        ratios = {"value": mean, "low": mean - half, "high": mean + half}
        results[name] = {
            "unquantised": round(math.exp(plain.mean()), 4),
            "fp8": round(math.exp(fp8.mean()), 4),
            "worse": {key: round(math.expm1(value), 6) for key, value in ratios.items()},
        }
        run.target(f"perplexity with FP8 weights above that without, {name}", results[name]["worse"]["value"], WORSE, "")
    run.write(__doc__, {"tokens": int(windows[:, 1:].size), "windows": len(windows), "models": {"demo": results}})


if __name__ == "__main__":
    run_benchmark(
        "parts.quantised_perplexity", "What FP8 weights cost the demonstration model.", benchmark,
        windows=Flag(64, "of 255 tokens, at most", 8),
    )  # fmt: skip
