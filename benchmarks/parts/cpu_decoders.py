"""The CPU's two decoders in turns: steps by NumPy and Numba against steps by torch.

    python -m benchmarks.parts.cpu_decoders

Each step of a case is computed by both, one after another, so that both meet the same disturbances: the demonstration model,
and the shape of Qwen3-0.6B with random weights. decode has one token of each stream behind a context, prefill whole prompts.
Ratios are NumPy's time over torch's, of one turn: in float32, and over torch's in bfloat16, which rounds where NumPy does not.
cpu_ratio is that of the processor time of all threads, in float32, which neighbours on the same cores disturb less.
"""

import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common.distribution import describe
from benchmarks.common.harness import ROOT, Flag, Run, check, run_benchmark
from blinkpy.models.cpu.cpu_step import CpuStep
from blinkpy.models.cpu.numpy_products import NumpyProgress, ThreadTeam
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.weights.array_weights import dummy_array_weights, load_array_weights
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

RATIO = 1.2
PAGE, STREAMS = 16, (1, 16)
CONTEXT = 256  # tokens of a stream that decodes, and of the one prompt alone
SHARED_PROMPT = 16  # tokens of each of several prompts
CAPACITY = 2 * CONTEXT
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
DTYPES = {"torch_float32": torch.float32, "torch_bfloat16": torch.bfloat16}


def weights_of(shape: str, model: DecoderDescription, dtype: torch.dtype | None) -> Any:
    """dtype: torch's; None: NumPy arrays."""
    if shape == "demo":
        return load_array_weights(model, DEMO_FOLDER) if dtype is None else load_weights(model, DEMO_FOLDER, dtype)
    spread = model.hidden_size**-0.5
    return dummy_array_weights(model, 1, spread) if dtype is None else dummy_weights(model, 1, dtype, spread=spread)


def compare(run: Run, shape: str, rounds: int) -> dict[str, Any]:
    """All cases of one model."""
    sys.path.append(str(ROOT / "tests"))
    from support.models.paged_batch import PagedBatches  # type: ignore[import-not-found,unused-ignore]

    model = describe_model(DEMO_FOLDER) if shape == "demo" else describe_config(QWEN3_06B)
    pages, tokens = max(STREAMS) * CAPACITY // PAGE, max(STREAMS) * SHARED_PROMPT
    steps = {
        name: CpuStep(model, weights_of(shape, model, dtype), pages, PAGE, CAPACITY, max(tokens, CONTEXT), None, progress)
        for name, dtype, progress in (
            ("numpy", None, NumpyProgress(team=ThreadTeam(torch.get_num_threads()))),
            *((name, dtype, None) for name, dtype in DTYPES.items()),
        )
    }
    rng, results = np.random.default_rng(1), dict[str, Any]()
    for streams in STREAMS:
        for kind in ("prefill", "decode"):
            batches = PagedBatches(
                rng, page_size=PAGE, num_pages=pages, slots=streams, max_model_len=CAPACITY, max_tokens=max(tokens, CONTEXT),
                max_rows=streams,
            )  # fmt: skip
            prompt = CONTEXT if streams == 1 else SHARED_PROMPT
            work = [(batches.add(rng.integers(0, model.vocab_size, CONTEXT).tolist()), prompt) for _ in range(streams)]
            if kind == "decode":
                for sequence, _ in work:
                    sequence.computed = sequence.prompt_length = CONTEXT - 1  # behind zeros: of both caches
                work = [(sequence, 1) for sequence, _ in work]
            batch, times = batches.batch(work), {name: list[float]() for name in steps}
            processor = {name: list[float]() for name in steps}
            for round_number in range(rounds + 1):
                run.progress(f"{shape}: {kind} of {streams}", round_number, rounds + 1)
                for name, step in steps.items():
                    began, spent = time.perf_counter(), time.process_time()
                    step.run(batch, batches.requests)
                    times[name].append(1000 * (time.perf_counter() - began))
                    processor[name].append(time.process_time() - spent)
            check_logits(steps, batch, batches.requests)
            samples = {name: np.array(found[1:]) for name, found in times.items()}  # the first one warms up
            case = {f"{name}_ms": describe(found, "ms") for name, found in samples.items()}
            case |= {f"ratio_to_{name}": describe(samples["numpy"] / samples[name], "") for name in DTYPES}
            case["cpu_ratio"] = describe(np.array(processor["numpy"][1:]) / processor["torch_float32"][1:], "")
            results[f"{kind}_{streams}"] = case
            ratio = case["ratio_to_torch_float32"]["p50"]["value"]
            run.target(f"{shape}, {kind} of {streams}: NumPy's step to torch's in float32", ratio, RATIO, "x")
    return results


def check_logits(steps: dict[str, CpuStep], batch: Any, requests: Any) -> None:
    """Both decoders give the same logits in float32."""
    ours, theirs = (
        np.asarray(steps[name].decoder.logits(steps[name].decoder.forward(batch, requests.page_table, np.array([0]))))
        for name in ("numpy", "torch_float32")
    )
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    check(error < 1e-4, f"logits differ by {error:.2g}")


def benchmark(run: Run) -> None:
    options = run.options
    if options.threads:
        torch.set_num_threads(options.threads)
    results = {"threads": torch.get_num_threads(), "demo": compare(run, "demo", options.rounds)}
    results["qwen3-0.6b"] = compare(run, "qwen3-0.6b", options.large_rounds)
    run.write(__doc__, results)


if __name__ == "__main__":
    run_benchmark(
        "parts.cpu_decoders",
        "The CPU's two decoders in turns.",
        benchmark,
        rounds=Flag(200, "of each case of the demonstration model", smoke=5),
        large_rounds=Flag(7, "of each case of Qwen3-0.6B's shape", smoke=1),
        threads=Flag(0, "of both; 0: one for each core"),
    )
