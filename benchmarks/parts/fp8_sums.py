"""The accuracy of the matrix unit's sums of FP8 products, and the cost of more exact sums.

    python -m benchmarks.parts.fp8_sums

Hopper's matrix unit adds FP8 products with fewer bits than float32 has. Triton can move partial sums to float32 registers after a
number of products (`max_num_imprecise_acc`), and cuBLAS does so without `use_fast_accum`. Each way is compared with float64 sums
of the same FP8 numbers: the error relative to the root mean square of the results, and the time of a product.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench_cudagraph

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from benchmarks.common.nvml import gpu_environment

FP8 = torch.float8_e4m3fn
CHECKED = 512  # columns of the result that float64 computes


@triton.jit
def _product(
    x_ptr,  # float8 [M, K]
    w_ptr,  # float8 [N, K]
    out_ptr,  # float32 [M, N]
    M, N, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EXACT_AFTER: tl.constexpr,  # products along K after which a partial sum is added in float32; 0: never
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=(n < N)[:, None], other=0.0)
        if EXACT_AFTER:
            sums = tl.dot(x, tl.trans(w), sums, max_num_imprecise_acc=EXACT_AFTER)
        else:
            sums = tl.dot(x, tl.trans(w), sums)
    tl.store(out_ptr + m[:, None] * N + n[None, :], sums, mask=(m < M)[:, None] & (n < N)[None, :])


def triton_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, exact_after: int) -> None:
    (rows, k), n = x.shape, len(w)
    block_m = 128 if rows >= 128 else 64
    grid = (triton.cdiv(rows, block_m), triton.cdiv(n, 128))
    _product[grid](x, w, out, rows, n, k, block_m, 128, 128, exact_after, num_warps=8, num_stages=4)


def cublas_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, fast: bool) -> None:
    ones = torch.ones(len(x), 1, device="cuda"), torch.ones(1, len(w), device="cuda")
    out.copy_(torch._scaled_mm(x, w.T, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16, use_fast_accum=fast))


def cublas_us(x: torch.Tensor, w: torch.Tensor, fast: bool, rep_ms: int) -> float:
    ones = torch.ones(len(x), 1, device="cuda"), torch.ones(1, len(w), device="cuda")
    out = torch.empty(len(x), len(w), dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        torch._scaled_mm(x, w.T, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16, use_fast_accum=fast, out=out)

    return float(do_bench_cudagraph(run, rep=rep_ms, return_mode="median")) * 1e3


def compare(rows: int, n: int, k: int, rep_ms: int, generator: torch.Generator) -> dict[str, Any]:
    """Errors and times at one size. The inputs are normal numbers whose largest of a row is 448, as rows are quantised."""

    def drawn(count: int) -> torch.Tensor:
        numbers = torch.randn(count, k, device="cuda", generator=generator)
        return (numbers * (448 / numbers.abs().amax(1, keepdim=True))).to(FP8)

    x, w, out = drawn(rows), drawn(n), torch.empty(rows, n, device="cuda")
    exact = x.double() @ w[:CHECKED].double().T
    scale = float(exact.pow(2).mean().sqrt())
    found: dict[str, Any] = {"rows": rows, "n": n, "k": k}

    def note(name: str, us: float) -> None:
        difference = out[:, :CHECKED].double() - exact
        error = float(difference.pow(2).mean().sqrt()) / scale
        found[name] = {"rms_error": error, "largest_error": float(difference.abs().max()) / scale, "us": round(us, 2)}
        check(error < 0.05, f"{name} at {rows} x {n} x {k}: relative error {error}")

    for exact_after in (0, 128, 64, 32):
        out.fill_(float("nan"))
        triton_product(x, w, out, exact_after)
        us = do_bench_cudagraph(lambda e=exact_after: triton_product(x, w, out, e), rep=rep_ms, return_mode="median") * 1e3
        note(f"triton, float32 after {exact_after}" if exact_after else "triton", float(us))
    for fast in (True, False):
        out.fill_(float("nan"))
        cublas_product(x, w, out, fast)
        note("cuBLAS, fast" if fast else "cuBLAS", cublas_us(x, w, fast, rep_ms))
    return found


def benchmark(run: Run) -> None:
    options = run.options
    generator = torch.Generator("cuda").manual_seed(options.seed)
    sizes = [(rows, n, k) for rows in options.rows for n, k in ((4096, 4096), (4096, 14336), (8192, 28672))]
    results = [compare(*size, options.rep_ms, generator) for size in sizes]
    run.write(__doc__, {"environment": gpu_environment(), "products": results})


if __name__ == "__main__":
    run_benchmark(
        "parts.fp8_sums",
        "How exact sums of FP8 products are.",
        benchmark,
        rows=Flag((64, 256, 2048), "rows of a step", smoke=(64,)),
        rep_ms=Flag(100, "milliseconds of each measurement", smoke=20),
        seed=Flag(1, "of the inputs"),
    )
