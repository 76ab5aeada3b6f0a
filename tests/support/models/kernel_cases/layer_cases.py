"""Cases of norms, activations, embeddings, and kernels that gather rows."""

from itertools import product

import numpy as np
import torch
from support.models import kernel_reference
from support.models.kernel_cases.kernel_inputs import close, draw, header, ints, poison, untouched
from torch import Tensor

from blinkpy.kernels.activation import quantised_swiglu, softcap, squared_relu, swiglu
from blinkpy.kernels.fp8_rows import Fp8Rows, quantise_rows
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.layer_inputs import gate_inputs, mix_inputs
from blinkpy.kernels.norm import embed, last_tokens, rms_norm


def norm_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, hidden: int) -> None:
    x, residual = (draw(rng, bucket, hidden, dtype=dtype, device=device) for _ in range(2))
    parts = draw(rng, 3, bucket, hidden, dtype=torch.float32, device=device)
    weight = draw(rng, hidden, dtype=torch.float32 if rng.integers(2) else dtype, device=device)
    counts = header(tokens, tokens, tokens, device)
    for source in (x, parts):  # added to the old content
        out = residual.clone()
        rms_norm(source, weight, 1e-5, counts, out, add=True)
        whole = source.double().sum(0) if source is parts else source
        expected = residual.double() + kernel_reference.rms_norm(whole, weight, 1e-5)
        close(out[:tokens], expected[:tokens], dtype, "added norm")
        assert torch.equal(out[tokens:], residual[tokens:])
        out, factor = residual.clone(), draw(rng, 1, dtype=dtype, device=device)
        rms_norm(source, weight, 1e-5, counts, out, add=True, factor=factor)
        close(out[:tokens], factor.double() * expected[:tokens], dtype, "added norm with a factor")
        assert torch.equal(out[tokens:], residual[tokens:])
    wide = draw(rng, bucket, hidden + 24, dtype=dtype, device=device)
    within, given = wide[:, 8 : 8 + hidden], wide.clone()
    rms_norm(within, weight, 1e-5, counts, within)  # in place, between other columns
    close(within[:tokens], kernel_reference.rms_norm(given[:tokens, 8 : 8 + hidden], weight, 1e-5), dtype, "norm in its place")
    within[:tokens] = given[:tokens, 8 : 8 + hidden]
    assert torch.equal(wide, given)
    for (source, add), centred in product(((x, False), (x, True), (parts, True)), (False, True)):
        summed = residual.clone()
        out = poison(bucket, hidden, dtype=dtype, device=device)
        rms_norm(source + centred, weight, 1e-5, counts, out, summed if add else None, centred=centred)
        whole = (source + centred).double().sum(0) if source is parts else (source + centred).double()
        expected = whole + residual.double() if add else whole
        normed = kernel_reference.rms_norm(expected[:tokens], weight, 1e-5, centred)
        close(out[:tokens], normed, dtype, f"norm, residual {add}, centred {centred}")
        untouched(out[tokens:], "norm")
        if add:
            close(summed[:tokens], expected[:tokens], dtype, "residual")
            assert torch.equal(summed[tokens:], residual[tokens:])


def last_token_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    lengths = [1, 1, 5, 3]
    tokens, bucket = sum(lengths), 16
    x, residual = (draw(rng, bucket, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = draw(rng, hidden, dtype=dtype, device=device)
    starts = ints([0, 1, 2, 7, 10, 10, 10], device)
    emits = ints([1, 0, 1, 1, 1, 1], device)  # the last two rows are padding
    batch = BatchView(header(4, tokens, 2, device), emits, starts, emits, emits, starts, starts)
    out = poison(6, hidden, dtype=dtype, device=device)
    last = [0, 6, 9]
    parts = draw(rng, 2, bucket, hidden, dtype=torch.float32, device=device)
    for (source, whole), centred in product(((x, x.double()), (parts, parts.double().sum(0))), (False, True)):
        rms_norm(source, weight, 1e-6, batch.counts, out, residual.clone(), last_tokens_of=batch, centred=centred)
        expected = kernel_reference.rms_norm((whole + residual.double())[last], weight, 1e-6, centred)
        close(out[[0, 2, 3]], expected, dtype, "last tokens")
        untouched(out[[1, 4, 5]], "last tokens")


def gather_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    """The residual stream of the last tokens, in a bucket with two rows more."""
    lengths = rng.integers(1, 9, 6)
    tokens, rows, bucket = int(lengths.sum()), len(lengths), len(lengths) + 2
    x, ends = draw(rng, tokens + 3, hidden, dtype=dtype, device=device), np.cumsum(lengths)
    starts = ints([0, *ends, tokens, tokens], device)
    out, counts = poison(bucket, hidden, dtype=dtype, device=device), header(7, 7, 7, device)
    last_tokens(x, starts, header(rows, tokens, 2, device), out, counts)
    assert torch.equal(out[:rows], x[(ends - 1).tolist()])
    untouched(out[rows:], "last tokens")
    assert counts[:2].tolist() == [rows, rows]


def swiglu_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, width: int) -> None:
    x = draw(rng, bucket, 2 * width, dtype=dtype, device=device, scale=3.0)
    for gelu in (False, True):
        out = poison(bucket, width, dtype=dtype, device=device)
        swiglu(x, header(tokens, tokens, 0, device), out, gelu=gelu)
        close(out[:tokens], kernel_reference.swiglu(x[:tokens], gelu), dtype, f"gelu {gelu}")
        untouched(out[tokens:], "swiglu")


def squared_relu_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, width: int) -> None:
    given = draw(rng, bucket, width, dtype=dtype, device=device, scale=3.0)
    x = given.clone()
    squared_relu(x, header(tokens, tokens, 0, device))
    close(x[:tokens], given[:tokens].double().clamp_min(0.0) ** 2, dtype, "squared ReLU")
    assert torch.equal(x[tokens:], given[tokens:])


def quantised_rows(x: Tensor, blocks: bool, given: float | None) -> tuple[Tensor, Tensor]:
    """float32 numbers x / scale, rounded to FP8, and the scales, by row and group."""
    values, scales = torch.zeros_like(x, dtype=torch.float32), []
    for row, line in enumerate(x.float()):
        for first in range(0, len(line), 128 if blocks else len(line)):
            part = line[first : first + (128 if blocks else len(line))]
            scales.append(torch.tensor(given) if given else part.abs().max().clamp_min(2.0**-100).cpu() / 448)
            quotient = (part / scales[-1].to(part.device)).clamp(-448, 448)
            values[row, first : first + len(part)] = quotient.to(torch.float8_e4m3fn).float()
    return values, torch.stack(scales).view((len(x), -1) if blocks else (len(x),)).to(x.device)


def quantised_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, width: int, blocks: bool,
    given: float | None,
) -> None:  # fmt: skip
    """Rows, their norm and their SwiGLU, with large numbers, some far apart, and a row of zeros."""
    counts, groups = header(tokens, tokens, 0, device), -(-width // 128)
    x, gate_up = (draw(rng, bucket, size, dtype=dtype, device=device, scale=3.0) for size in (width + 8, 2 * width))
    x, weight = x[:, :width], draw(rng, width, dtype=dtype, device=device)
    x[:tokens:3, :: max(1, width // 3)] *= 300.0
    x[tokens - 1], gate_up[tokens - 1] = 0.0, 0.0

    def empty() -> Fp8Rows:
        values = torch.full((bucket, width), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return Fp8Rows(values, poison(*((bucket, groups) if blocks else (bucket,)), dtype=torch.float32, device=device))

    def check(found: Fp8Rows, source: Tensor, share: float, what: str) -> None:
        values, scales = quantised_rows(source[:tokens], blocks, given)
        same = (found.values[:tokens].float() == values).float().mean()
        assert same >= 1 - share, f"{what}: {1 - same:.2%} of the values differ"
        close(found.scales[:tokens], scales, torch.float32 if share == 0 else torch.bfloat16, f"{what}: scales")
        untouched(found.scales[tokens:], what)
        assert bool((found.values[tokens:].view(torch.uint8) == 0x7F).all()), f"{what}: padding was written"

    out, (normed, inner) = empty(), (poison(bucket, width, dtype=dtype, device=device) for _ in range(2))
    quantise_rows(x, counts, out, given)
    check(out, x, 0.0, "rows")
    for keep in (False, True):
        out = empty()
        rms_norm(x, weight, 1e-5, counts, normed, quantised=(out, given), keep=keep)
        if keep:
            close(normed[:tokens], kernel_reference.rms_norm(x[:tokens], weight, 1e-5), dtype, "norm")
        else:
            untouched(normed, "norm")
            rms_norm(x, weight, 1e-5, counts, normed)
        check(out, normed, 1e-3, f"norm, kept {keep}")
    for gelu in (False, True):
        out = empty()
        quantised_swiglu(gate_up, counts, out, given, gelu=gelu)
        swiglu(gate_up, counts, inner, gelu=gelu)
        check(out, inner, 1e-2, "swiglu")


def softcap_case(rng: np.random.Generator, device: str, rows: int, bucket: int, vocabulary: int) -> None:
    """Logits far below and far above the cap."""
    given, cap = draw(rng, bucket, vocabulary, dtype=torch.float32, device=device, scale=30.0), float(rng.uniform(0.5, 60))
    given[:, :2] = torch.tensor([1e30, -1e30])
    logits = given.clone()
    with np.errstate(over="ignore"):  # in the interpreter
        softcap(logits, header(rows, 2 * rows, 0, device), cap)
    close(logits[:rows], kernel_reference.capped(given[:rows], cap), torch.float32, f"softcap {cap}")
    assert torch.equal(logits[rows:], given[rows:])


def layer_inputs_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, width: int) -> None:
    """Embeddings of tokens for each of three layers: their mixture, and one layer's gate."""
    layers, layer, eps, factor = 3, int(rng.integers(3)), 1e-5, float(rng.uniform(0.1, 50))
    x, table = (draw(rng, rows, layers * width, dtype=dtype, device=device) for rows in (bucket, 50))
    weight, ids = draw(rng, width, dtype=dtype, device=device), ints(rng.integers(0, 50, bucket), device)
    ids[0] = 50  # outside the table
    counts, mixed = header(tokens, tokens, 0, device), x.clone()
    mix_inputs(mixed, ids, table, weight, eps, counts, factor=factor)
    own = table[ids.long().clamp_max(49)].double() * (ids < 50)[:, None]
    normed = kernel_reference.rms_norm(x.view(bucket, layers, width), weight, eps).view(bucket, -1)
    close(mixed[:tokens], ((normed + factor * own) * 0.5**0.5)[:tokens], dtype, "mixed inputs")
    assert torch.equal(mixed[tokens:], x[tokens:])
    inputs = mixed[:, layer * width : (layer + 1) * width]
    for rows in (tokens, 1):  # for each token, and for the last token of a single row
        gate = draw(rng, rows + 1, width, dtype=dtype, device=device, scale=3.0)
        given, batch = gate.clone(), None
        if rows < tokens:
            places = {name: ints([0, tokens], device) for name in BatchView._fields}
            batch = BatchView(**places | {"query_starts": ints([0, tokens, tokens], device), "counts": counts})
        gate_inputs(gate, inputs, header(rows, rows, 0, device), batch)
        of = inputs[:tokens] if batch is None else inputs[tokens - 1 : tokens]
        close(gate[:rows], kernel_reference.swiglu(torch.cat([given[:rows], of], 1), True), dtype, "gated inputs")
        assert torch.equal(gate[rows:], given[rows:])


def embedding_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, hidden: int) -> None:
    table = draw(rng, 50, hidden, dtype=dtype, device=device)
    ids = ints(rng.integers(0, 50, bucket), device)
    out = poison(bucket, hidden, dtype=dtype, device=device)
    for factor in (float(rng.uniform(0.1, 50)), 1.0):
        embed(ids, table, header(tokens, tokens, 0, device), out, factor=factor)
        assert torch.equal(out[:tokens], (table[ids[:tokens].long()].float() * factor).to(dtype))
    untouched(out[tokens:], "embedding")
    ids[0] = 50  # outside the table
    embed(ids, table, header(tokens, tokens, 0, device), out)
    assert not out[0].any()
