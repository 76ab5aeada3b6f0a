"""transformers' logits, and the positions up to which rounding can't change the choice of experts."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.models.model_zoo import text_model
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router

TIE = 1e-5  # of two experts' weights, whose error is up to 9e-6 with delta nets


def expected_logits(
    model: torch.nn.Module, tokens: list[int], experts_per_token: int, tie: float = TIE
) -> tuple[np.ndarray, int]:
    """transformers' logits [tokens, vocab], and the first position at which rounding may choose another expert, which affects all
    later tokens. tie: the largest difference of two experts' weights that rounding may reverse."""
    ties = [len(tokens)]

    def find_ties(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        ranks = outputs[1] if isinstance(router, Llama4Router) else outputs[0]
        if isinstance(router, Gemma4TextRouter):  # its outputs are probabilities
            ranks = ranks.log()
        if isinstance(router, Ernie4_5_MoeTopKRouter):
            ranks = router.moe_statics(ranks.softmax(-1))
        if isinstance(router, Lfm2MoeTopKRouter):
            ranks = ranks.sigmoid() + inputs[1]
        kept, biased = getattr(router, "topk_group", 0), hasattr(router, "e_score_correction_bias")
        if kept and getattr(router, "topk_method", "") != "greedy":
            ranks = ranks.sigmoid() + router.e_score_correction_bias if biased else ranks
            grouped = ranks.view(len(ranks), router.num_group, -1)
            groups = grouped.sort(descending=True).values[..., : 2 if biased else 1].sum(-1)
            if kept < router.num_group:
                note_ties(groups, kept)
            lowest = groups.sort(descending=True).values[:, kept - 1 : kept]
            ranks = grouped.masked_fill((groups < lowest)[..., None], -torch.inf).view(len(ranks), -1)
        note_ties(ranks, experts_per_token)

    def note_ties(ranks: torch.Tensor, kept: int) -> None:
        ordered = ranks.sort(descending=True).values
        ties.extend((ordered[:, kept - 1] - ordered[:, kept] < tie).nonzero()[:1, 0].tolist())

    with exact_delta_nets(text_model(model)) as text, torch.no_grad():
        routers = [module for name, module in text.named_modules() if name.endswith((".gate", ".router"))]
        hooks = [router.register_forward_hook(find_ties) for router in routers]
        assert bool(hooks) == bool(experts_per_token)
        logits = text(torch.tensor([tokens])).logits[0].float().numpy()
    for hook in hooks:
        hook.remove()
    return logits, min(ties)


def greedy_tokens(model: torch.nn.Module, prompt: list[int], found: list[int], rounding: float = 1e-3) -> int:
    """Assert that each token is the most probable after the previous tokens, or as probable within rounding. Stops at a token for
    which rounding may choose another expert. Returns the number of judged tokens."""
    logits, end = expected_logits(model, [*prompt, *found], experts_of_a_token(model.config))
    judged = max(0, min(len(found), end - len(prompt) + 1))
    own = logits[len(prompt) - 1 :][:judged]
    assert (own.max(1) - own[np.arange(judged), found[:judged]] <= rounding).all()
    return judged


class Float64Torch(ModuleType):
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@contextmanager
def exact_delta_nets(text: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model itself, or in float64 if it has gated delta nets: transformers computes them in chunks, whose float32 error can
    exceed our tolerance."""
    if not hasattr(text.config.get_text_config(), "linear_num_key_heads"):
        yield text
        return
    module, text = sys.modules[type(text).__module__], copy.deepcopy(text).double()
    text.config.get_text_config()._experts_implementation = "eager"  # the other implementations lack float64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", Float64Torch("torch"))
        yield text


def experts_of_a_token(config: Any) -> int:
    """The number of experts of a token; 0 without experts."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
