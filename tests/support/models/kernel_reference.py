"""Reference functions of the GPU kernels, in plain torch and float64: slow, obvious, and independent of the kernels.

Shared by the tests of the kernels (interpreted and on a GPU) and by the benchmarks. Inputs of any float dtype are
widened to float64 first; results are float64 (or integers).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; NaN or infinity anywhere in `out` gives infinity."""
    out, expected = out.double().cpu(), expected.double().cpu()
    if out.shape != expected.shape:
        raise ValueError(f"shapes {list(out.shape)} and {list(expected.shape)} differ")
    if not torch.isfinite(out).all():
        return math.inf
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
    """x: [..., hidden]; weight: [hidden]. centred: LayerNorm instead."""
    x = x.double()
    if centred:
        return torch.nn.functional.layer_norm(x, weight.shape, weight.double(), None, eps)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[1] elements of each head. x: [tokens, heads, head_dim]; cos, sin: [max_len, rotary
    / 2]."""
    x = x.double()
    half = cos.shape[1]
    c, s = (table.double()[positions.long()][:, None] for table in (cos, sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence. cache: [N, kv_heads, page_size, head_dim]; returns [length, kv_heads,
    head_dim]."""
    return torch.cat([cache[int(page)].transpose(0, 1) for page in pages[: -(-length // cache.shape[2])]])[:length].double()


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, context: int, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, chunked: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention of one row whose last q.shape[0] tokens are the queries. q: [n, heads, head_dim] -> the same shape. sinks:
    [heads], scores of one more key without a value. chunked: tokens see only tokens of the same chunk of `window`."""
    n, heads, _ = q.shape
    group = heads // k_cache.shape[1]
    k = gather_pages(k_cache, pages, context).repeat_interleave(group, 1)
    v = gather_pages(v_cache, pages, context).repeat_interleave(group, 1)
    score = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    score = capped(score, softcap) if softcap else score
    query, key = torch.arange(context - n, context, device=q.device)[:, None], torch.arange(context, device=q.device)[None]
    hidden = key > query
    if window:
        hidden = hidden | ((query // window != key // window) if chunked else (query - key >= window))
    score = score.masked_fill(hidden, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None, None].expand(heads, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(score, -1)[..., :context], v)


def capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x.double() / cap) * cap


def swiglu(x: Tensor, gelu: bool = False) -> Tensor:
    """x: [..., 2 * width], gate then up -> [..., width]. gelu: use gelu, approximated by tanh, instead of silu."""
    gate, up = x.double().chunk(2, -1)
    if gelu:
        return gate * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    return gate * torch.sigmoid(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [m, k]; weight: [n, k]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def route(logits: Tensor, top_k: int, normalize: bool, groups: int = 1, kept: int = 1) -> tuple[Tensor, Tensor]:
    """Softmax over experts, the top_k of each token (lower id first among equals): (weights, ids), both [tokens, top_k].
    The choice is from the `kept` groups with the likeliest experts."""
    probability = torch.softmax(logits.double(), -1)
    best = probability.unflatten(1, (groups, -1)).amax(-1)
    first = torch.argsort(best, dim=-1, descending=True, stable=True)[:, :kept]
    open_to = torch.zeros_like(best, dtype=torch.bool).scatter(1, first, True).repeat_interleave(logits.shape[1] // groups, 1)
    ids = torch.argsort(probability.masked_fill(~open_to, -1), dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probability.gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids


def route_by_sigmoid(logits: Tensor, bias: Tensor, top_k: int, normalize: bool, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """As route(), by sigmoids: for each token the `kept` groups whose best two experts have the largest sum of sigmoid + bias,
    and of these the best top_k experts. The choice is made in float32, so that ties are those of the kernel."""
    shares = torch.sigmoid(logits)
    every = range(logits.shape[1])
    size, chosen = logits.shape[1] // groups, []
    for ranks in (shares + bias).tolist():
        best = [sum(np.float32(r) for r in sorted(ranks[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        open_to = sorted(range(groups), key=lambda g: (-best[g], g))[:kept]
        chosen.append(sorted((e for e in every if e // size in open_to), key=lambda e: (-ranks[e], e))[:top_k])
    ids = torch.tensor(chosen, device=logits.device)
    weights = shares.double().gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids


def route_by_biased_softmax(logits: Tensor, bias: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """As route(), by a softmax over all experts: for each token the top_k experts with the largest softmax + bias."""
    shares = torch.softmax(logits.double(), -1)
    ids = torch.argsort(shares + bias.double(), dim=-1, descending=True, stable=True)[:, :top_k]
    weights = shares.gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids


def route_by_sigmoid_of_top_k(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """As route(), by sigmoids of the top_k largest logits."""
    ids = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.sigmoid(logits.double().gather(1, ids))
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids


def clamped_swish(x: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of gpt-oss. x: [..., 2 * width], gate then up -> [..., width]."""
    gate, up = x.double().chunk(2, -1)
    gate = torch.where(gate > limit, limit, gate)
    return gate * torch.sigmoid(alpha * gate) * (1 + torch.where(up.abs() > limit, limit * up.sign(), up))


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as float64, weight by weight. blocks: uint8 [..., rows, columns / 2]; scales: uint8 [..., rows, columns / 32]."""
    codes = np.stack([blocks.cpu().numpy() & 15, blocks.cpu().numpy() >> 4], -1).reshape(*blocks.shape[:-1], -1)
    exponent, mantissa, sign = codes >> 1 & 3, codes & 1, np.where(codes >> 3, -1.0, 1.0)
    value = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(int) - 1))
    factor = 2.0 ** (scales.cpu().numpy().astype(int) - 127)
    return torch.from_numpy(sign * value * np.repeat(factor, 32, -1)).to(blocks.device)


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] = (0.0, 0.0), rounded: Callable[[Tensor], Tensor] = lambda x: x, scales_inputs: bool = False,
) -> Tensor:  # fmt: skip
    """Mixture of experts. x: [t, hidden]; gate_up: [E, 2 * width, hidden]; down: [E, hidden, width]; weights, ids: [t, k];
    biases: [E, 2 * width] and [E, hidden]; clamp: alpha and limit of clamped_swish, whose limit 0 stands for SwiGLU, and -1 for
    GeGLU. If gate_up is [E, width, hidden], the experts have no gate, but squared ReLU. rounded: rounds inputs as the matrices
    do. scales_inputs: an expert's weight multiplies its input, not its result."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            first, second = (None, None) if biases is None else (bias[expert] for bias in biases)
            given = x[token : token + 1].double()
            if scales_inputs:
                given, weight = given * weight.double(), torch.ones_like(weight)
            inner = linear(rounded(given), gate_up[expert], first)
            if inner.shape[-1] == down.shape[-1]:  # without a gate
                inner = inner.clamp_min(0.0) ** 2
            else:
                inner = clamped_swish(inner, *clamp) if clamp[1] > 0 else swiglu(inner, clamp[1] < 0)
            out[token] += weight.double() * linear(rounded(inner), down[expert], second)[0]
    return out


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 (key: the seed's two words; counter: position, 0, 0, 0), first word, as a number in [0, 1).

    The last step is that of triton.language.rand: the word as a signed word, folded to 31 bits, times just under 2 ** -31.
    """
    mask = 0xFFFFFFFF
    counter, key = [position & mask, 0, 0, 0], [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second & mask, first >> 32 ^ counter[3] ^ key[1], first & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    word = counter[0] - 2**32 if counter[0] >= 2**31 else counter[0]
    return float(np.float32(-word - 1 if word < 0 else word) * np.float32(4.6566127342e-10))


def penalize(
    logits: np.ndarray, history: np.ndarray, prompt_length: int, repetition: float, presence: float, frequency: float
) -> np.ndarray:
    """Logits [V] after the penalties. history: [n] token ids, of which the first prompt_length are the prompt."""
    times = np.bincount(history[prompt_length:], minlength=len(logits))
    seen = np.isin(np.arange(len(logits)), history)
    repeated = np.where(logits > 0, logits / np.float32(repetition), logits * np.float32(repetition))
    logits = np.where(seen & (repetition != 1), repeated, logits)
    return (logits - np.float32(presence) * (times > 0) - np.float32(frequency) * times.astype(np.float32)).astype(np.float32)


def sample_span(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: float, slack: float
) -> np.ndarray:
    """The tokens that a float32 sampler may draw: for numbers within `slack` of the uniform number, and for top_p and min_p with
    a relative error of `slack`."""
    if temperature <= 0:
        return np.array([logits.argmax()])
    # Distances from the best in float32, as stored in candidates' keys: token ids order equal distances.
    distance = ((logits.max() - logits) / np.float32(temperature)).astype(np.float32)
    order = np.argsort(distance, kind="stable")
    order = order[np.isfinite(distance[order])]
    weight = np.exp(-distance[order].astype(np.float64))
    weight = weight[:top_k] if top_k > 0 else weight
    chosen = set[int]()
    for more in {-slack, slack}:
        kept = weight >= min_p * (1 - more)
        if top_p < 1:
            kept &= np.cumsum(weight) - weight < top_p * (1 + more) * weight.sum()
        kept[0] = True
        mass = np.cumsum(weight[kept])
        first, last = (min(int((mass <= u * mass[-1]).sum()), len(mass) - 1) for u in (number - slack, number + slack))
        chosen |= set(order[kept.nonzero()[0]][first : last + 1].tolist())
    return np.array(sorted(chosen))


def top_logprobs(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(float64 log probabilities [V], ids [k] of the largest, lower ids first among equals)."""
    wide = logits.astype(np.float64)
    values = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    return values, np.argsort(-wide, kind="stable")[:k]
