"""Cases of routers and experts."""

from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from support.models import fp8_reference, kernel_reference
from support.models.kernel_cases.kernel_inputs import LIMITS, close, draw, header, poison, untouched
from support.models.kernel_cases.linear_cases import draw_packed
from torch import Tensor

from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertCase, ExpertConfig, ExpertTable, ExpertWorkspace
from blinkpy.kernels.moe.experts import experts, gate_shared, plan_experts
from blinkpy.kernels.moe.routing import Routing, Selection, route, router_logits
from blinkpy.kernels.quantised_matrices import PackedMatrix


def router_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, count: int, hidden: int
) -> None:
    """Norm and router in one kernel, with a bias and without."""
    x, scales = (draw(rng, *shape, dtype=dtype, device=device) for shape in ((bucket, hidden), (hidden,)))
    router = draw(rng, count, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    for bias in (None, draw(rng, count, dtype=dtype, device=device)):
        normed = poison(bucket, hidden, dtype=dtype, device=device)
        logits = poison(bucket, count, dtype=torch.float32, device=device)
        router_logits(x, (scales, 1e-5), router, header(tokens, tokens, 0, device), normed, logits, bias)
        close(normed[:tokens], kernel_reference.rms_norm(x[:tokens], scales, 1e-5), dtype, "norm before the router")
        close(logits[:tokens], kernel_reference.linear(normed[:tokens], router, bias), torch.float32, "logits of the router")
        untouched(normed[tokens:], "norm before the router")
        untouched(logits[tokens:], "logits of the router")


def shared_gate_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, hidden: int, width: int
) -> None:
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    x, gate = draw(rng, bucket, hidden, **make), draw(rng, 1, hidden, scale=hidden**-0.5, **make)
    given = draw(rng, bucket, width, **make)
    inner = given.clone()
    gate_shared(x, gate, inner, header(tokens, tokens, 0, device))
    expected = given.double() * torch.sigmoid(x.double() @ gate.double().T)
    close(inner[:tokens], expected[:tokens], dtype, "gated results")
    assert torch.equal(inner[tokens:], given[tokens:])


def routing_case(rng: np.random.Generator, device: str, case: ExpertCase, block_m: int) -> None:
    """The choice of experts, and the sorting of assignments into blocks. Equal logits rank equally only with equal biases."""
    tokens, (count, top_k, *_) = case.tokens, astuple(case.shape)
    biases = [draw(rng, count, dtype=torch.float32, device=device, scale=0.3)]
    if case.ties:
        biases.append(torch.full_like(biases[0], 0.25))
    for bias in biases:
        logits, selection = expert_logits(rng, device, case), case.selection(bias)
        routing = Routing.allocate(case.bucket, count, top_k, block_m, device)
        routing.assignments.fill_(12345)
        routing.block_experts.fill_(12345)
        route(logits, header(tokens, tokens, 0, device), routing, selection)
        weights, ids = reference_route(logits[:tokens], top_k, selection)
        assert torch.equal(routing.ids[:tokens].long(), ids), "experts"
        close(routing.weights[:tokens], weights, torch.float32, "weights of experts")
        used = routing.block_experts >= 0
        blocks = routing.assignments.view(-1, block_m)[used]
        assert sorted(blocks[blocks >= 0].tolist()) == list(range(tokens * top_k))
        for expert, block in zip(routing.block_experts[used].tolist(), blocks, strict=True):
            assert (ids.reshape(-1)[block[block >= 0].long()] == expert).all(), "a block of another expert"


def expert_logits(rng: np.random.Generator, device: str, case: ExpertCase) -> Tensor:
    """float32 [bucket, experts], NaN for missing tokens."""
    logits = draw(rng, case.bucket, case.shape.experts, dtype=torch.float32, device=device)
    if case.one_expert:
        logits[:, 0] = 9.0
    if case.ties:
        logits = logits.round().clamp(-1, 0)
        logits[0, case.shape.experts // 2] = float("nan")
    logits[case.tokens :] = float("nan")
    return logits


def reference_route(logits: Tensor, top_k: int, selection: Selection) -> tuple[Tensor, Tensor]:
    logits, normalize = torch.nan_to_num(logits, nan=-float("inf")), selection.normalize
    groups, kept, bias, factors = selection.groups, selection.kept, selection.bias, selection.factors
    if selection.sigmoid:
        weights, ids = kernel_reference.route_by_sigmoid_of_top_k(logits, top_k, normalize)
    elif bias is None:
        weights, ids = kernel_reference.route(logits, top_k, normalize, groups, kept)
    elif selection.softmax:
        weights, ids = kernel_reference.route_by_biased_softmax(logits, bias, top_k, normalize)
    else:
        weights, ids = kernel_reference.route_by_sigmoid(logits, bias, top_k, normalize, groups, kept)
    return weights * selection.factor * (1 if factors is None else factors[ids]), ids


def draw_mxfp4(rng: np.random.Generator, *shape: int, device: str) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of matrices [experts, rows, columns]. Most products are about as large as their inputs. One row
    has the smallest scales with an effect, and another has large scales."""
    experts, rows, columns = shape
    usual = 127 - round(np.log2(3 * columns**0.5))
    scales = rng.integers(usual - 3, usual + 2, (experts, rows, columns // 32))
    scales[:, rng.integers(rows)] = 1
    scales[:, rng.integers(rows)] = usual + 4
    blocks = rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
    return torch.from_numpy(blocks).to(device), torch.from_numpy(scales.astype(np.uint8)).to(device)


def packed_experts(
    rng: np.random.Generator, device: str, experts: int, rows: int, width: int, **how: Any
) -> tuple[PackedMatrix, Tensor]:
    """4-bit matrices of all experts, and their float64 values."""
    each = [draw_packed(rng, device, rows, width, **how) for _ in range(experts)]
    fields = [[getattr(packed, name) for packed, _ in each] for name in ("words", "scales", "factors", "columns")]
    words, scales, factors, columns = (None if some[0] is None else torch.stack(some) for some in fields)
    return PackedMatrix(words, scales, width, factors, columns), torch.stack([exact for _, exact in each])


def experts_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, name: str, case: ExpertCase, config: ExpertConfig | None = None
) -> None:
    """A whole expert layer by a variant, with all tokens and without the last one. config: instead of the case's."""
    tokens, bucket, shape, config = case.tokens, case.bucket, case.shape, config or case.config
    make = {"dtype": dtype, "device": device}
    table = ExpertTable({} if config is None else {shape.key(dtype): {bucket: config}})
    plan = plan_experts(shape, bucket, dtype, device, table, name)
    logits = expert_logits(rng, device, case)
    bias = draw(rng, shape.experts, dtype=torch.float32, device=device, scale=0.3)
    selection = case.selection(bias)
    weights, ids = reference_route(logits[:tokens], shape.top_k, selection)
    x = draw(rng, bucket, shape.hidden, **make)
    x[tokens:] = float("nan")
    sizes = ((shape.experts, shape.halves * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width))
    gate_up, down, scales = (*(draw(rng, *size, scale=size[-1] ** -0.5, **make) for size in sizes), None)
    exact = (gate_up, down)
    if shape.mxfp4:
        (gate_up, first), (down, second) = (draw_mxfp4(rng, *size, device=device) for size in sizes)
        exact, scales = (kernel_reference.mxfp4(gate_up, first), kernel_reference.mxfp4(down, second)), (first, second)
    fp8, rounded = None, lambda x: x
    if shape.fp8:
        matrices = [fp8_reference.fp8_matrix(weight, shape.fp8 == "blocks") for weight in (gate_up, down)]
        fp8, gate_up, down = (matrices[0], matrices[1]), matrices[0].values, matrices[1].values
        exact = (fp8_reference.exact(matrices[0]), fp8_reference.exact(matrices[1]))
        if name != "gemv":  # this variant does not quantise its inputs
            rounded = partial(fp8_reference.rounded, blocks=shape.fp8 == "blocks", dtype=dtype)
    packed = None
    if shape.packed:
        how_packed = {"group": shape.group, "fp4": shape.packed == "fp4", "ordered": shape.ordered}
        pairs = [packed_experts(rng, device, *size, **how_packed) for size in sizes]
        packed, exact = (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1])
        gate_up, down = packed[0].words, packed[1].words
    drawn = tuple(draw(rng, *size[:2], **make) for size in sizes)
    biases = (drawn[0], drawn[1]) if case.biases else None
    residual = draw(rng, tokens, shape.hidden, **make)
    outs = []
    for live in (tokens, tokens if tokens == 1 else tokens - 1):
        inner = poison(bucket * shape.top_k * shape.width, **make)
        scratch = ExpertWorkspace.allocate(shape, bucket, dtype, device).quantised
        workspace = ExpertWorkspace(inner, poison(bucket * shape.top_k * shape.hidden, **make), scratch)
        out = poison(bucket, shape.hidden, **make)
        if not case.parallel:
            out[:live] = residual[:live]
        counts = header(tokens, live, 0, device)
        call = ExpertCall(x, logits, gate_up, down, counts, out, workspace, shape.top_k, selection)
        experts(
            replace(call, clamp=case.clamp, biases=biases, scales=scales, fp8=fp8, packed=packed, add=not case.parallel), plan
        )
        untouched(out[live:], "experts")
        untouched(inner.view(-1, shape.width)[live * shape.top_k :], "inner results of experts")
        outs.append(out[:live])
    assert torch.equal(outs[0][: len(outs[1])], outs[1]), "a token depends on its neighbours, or two runs differ"
    how = (biases, case.clamp, rounded, case.scales_inputs)
    expected = kernel_reference.experts(x[:tokens], *exact, weights, ids, *how)
    if not case.parallel:
        expected += residual.double()
    # An intermediate bfloat16 number with an error of one step may round to the next FP8 number.
    assert kernel_reference.relative_error(outs[0], expected) <= (3e-2 if fp8 and name != "gemv" else LIMITS[dtype]), (
        f"experts by {name}"
    )
