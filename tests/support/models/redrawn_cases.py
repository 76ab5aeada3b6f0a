"""Cases that compare float32 computations of different sizes, such as two batches. If two tokens or two experts are nearly equal,
rounding decides, and all later results differ. Then the case runs again with other inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from blinkpy.models.cpu import cpu_step, numpy_decoder, torch_decoder
from blinkpy.models.cpu.cpu_sampler import sample_rows
from blinkpy.models.cpu.draft_head import DraftHead
from blinkpy.models.description.blocks import RouterKind

P = ParamSpec("P")
T = TypeVar("T")
CASES = 4  # the last failure counts despite ties
MOST_UNJUDGED = 16  # cases whose ties leave too little to compare; up to a third of the cases with long contexts
EXPERT_SLACK = 1e-5  # of a router's scores: the difference of steps of other sizes is smaller
LOGIT_SLACK = 1e-4  # of logits; it changes sums of probabilities by 1e-6 or more
TRIES = 8


class TooManyTiesError(AssertionError):
    """Ties left too little of a case to compare."""


@contextmanager
def noted_ties() -> Iterator[list[str]]:
    """Within the block, the list gets an entry whenever rounding may choose an expert or a token of the CPU engine."""
    ties = list[str]()

    def noting(route: Callable[..., Any]) -> Callable[..., Any]:
        def routed(scores: Any, experts: Any, *more: Any) -> Any:
            found = route(scores, experts, *more)
            shift = np.full(scores.shape, EXPERT_SLACK, np.float32)
            np.put_along_axis(shift, np.asarray(found[1]), -EXPERT_SLACK, 1)
            _, others = route(scores + (torch.from_numpy(shift) if isinstance(scores, torch.Tensor) else shift), experts, *more)
            if not np.array_equal(*(np.sort(np.asarray(chosen), 1) for chosen in (found[1], others))):
                ties.append("experts")
            return found

        return routed

    def sampled(logits: np.ndarray, *more: Any) -> Any:
        found, rng = sample_rows(logits, *more), np.random.default_rng(1)
        for _ in range(TRIES):
            noise = rng.uniform(-LOGIT_SLACK, LOGIT_SLACK, logits.shape).astype(np.float32)
            if not np.array_equal(sample_rows(logits + noise, *more), found):
                ties.append("tokens")
                break
        return found

    def noting_drafts(kind: type[torch_decoder.TorchDecoder]) -> Callable[..., Any]:
        draft = kind.draft

        def drafted(decoder: torch_decoder.TorchDecoder, *arguments: Any) -> Any:
            found = draft(decoder, *arguments)
            results = decoder.normed(found[1]) if kind is DraftHead else found[1]
            best = decoder.progress.linear(results, decoder.weights.lm_head).float().topk(2).values
            if bool((best[:, 0] - best[:, 1] < LOGIT_SLACK).any()):
                ties.append("drafts")
            return found

        return drafted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_step, "sample_rows", sampled)
        for decoder in (torch_decoder.TorchDecoder, DraftHead):
            patch.setattr(decoder, "draft", noting_drafts(decoder))
        for blocks in (torch_decoder.BLOCKS, numpy_decoder.BLOCKS):
            for kind in RouterKind:
                if kind in blocks:
                    patch.setitem(blocks, kind, noting(blocks[kind]))
        yield ties


def redrawn_at_ties(case: Callable[P, T]) -> Callable[P, T]:
    """A case that runs again, with fresh inputs of its generator, if it fails and rounding may have decided."""

    @wraps(case)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        failed = 0
        for _ in range(MOST_UNJUDGED):
            with noted_ties() as ties:
                try:
                    return case(*arguments, **options)
                except TooManyTiesError:
                    continue
                except AssertionError:
                    failed += 1
                    if not ties or failed == CASES:
                        raise
        return case(*arguments, **options)

    return run
