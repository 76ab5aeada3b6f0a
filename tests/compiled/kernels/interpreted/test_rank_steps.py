"""The GPU's decoder on several ranks of one memory, in the interpreter, compared with one rank.

Supports claim ranks/results.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import model_zoo
from support.models.paged_batch import Sequence
from support.models.step_cases import ROWS_AT_MOST, TOKENS_AT_MOST, OnDevice
from support.models.turnstile import Turnstile
from support.part_of_cases import part_of

from blinkpy.kernels import all_reduce
from blinkpy.kernels.all_reduce import connect_peers
from blinkpy.kv.state import ROWS
from blinkpy.models.description.split import Share
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.rank_checkpoint import rank_description
from blinkpy.models.weights.weight_loader import load_weights

SLOTS, STEPS = 4, 3
CASES = [  # (family, ranks, changes of its config.json)
    ("llama3", 2, {}),
    ("llama-biased-mqa", 2, {}),
    ("qwen3-moe", 2, {}),
    ("glm4-moe", 2, {}),
    ("gpt-oss-mxfp4", 2, {"intermediate_size": 64}),
    ("gemma3", 2, {}),
    ("gemma4-moe", 2, {}),
    ("cohere2-biased", 2, {}),
    ("qwen3", 4, {}),
]


def on_ranks(rng: np.random.Generator, folder: Path, ranks: int, **options: Any) -> list[OnDevice]:
    """The model on one rank, then on each of several ranks, in float32."""
    model, dtype = as_stored(describe_model(folder), folder), torch.float32
    made = [OnDevice(rng, model, load_weights(model, folder, dtype), slots=SLOTS, **options)]
    shares = [Share(rank, ranks) for rank in range(ranks)]
    head = [share.head(model.vocab_size) for share in shares]
    peers = connect_peers([torch.device("cpu")] * ranks, dtype, TOKENS_AT_MOST, model.hidden_size, ROWS_AT_MOST, head)
    for share, own in zip(shares, peers, strict=True):
        weights = load_weights(model, folder, dtype, share=share)
        made.append(OnDevice(rng, rank_description(model, share), weights, slots=SLOTS, peers=own, **options))
        made[-1].batches = made[0].batches
    return made


CHOSEN = part_of(CASES, 9)


@pytest.mark.parametrize(("name", "ranks", "config"), CHOSEN, ids=[name for name, *_ in CHOSEN])
def test_ranks_compute_as_one(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, config: dict[str, Any]
) -> None:
    """Prompts in chunks next to decode rows, then decode rows alone. Logits and tokens are equal on all ranks, bit for bit."""
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", 3 * model_zoo.BASE["hidden_size"] * 4)  # larger steps use two shots
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), **config)
    one, *others = on_ranks(rng, tmp_path, ranks)
    turnstile, batches = Turnstile(monkeypatch, ranks), one.batches
    vocab = one.step.decoder.model.vocab_size
    running = [batches.add(rng.integers(0, vocab, n).tolist()) for n in (1, int(rng.integers(5, 9)))]
    for step in range(STEPS):
        work = list[tuple[Sequence, int]]()
        for sequence in running:
            left = len(sequence.tokens) - sequence.computed
            work.append((sequence, left if step else min(left, 3)))
        batch = batches.batch(work)
        shape, *_ = (own.give(batch) for own in (one, *others))
        for own in (one, *others):
            own.step.decoder.buffers.logits.fill_(float("nan"))
        one.step.launch(shape)
        turnstile.run([partial(own.step.launch, shape) for own in others])
        rows = np.flatnonzero(batch.emits[: int(batch.counts[ROWS])]).tolist()
        expected, *found = (own.step.decoder.buffers.logits[rows] for own in (one, *others))
        assert len(rows) > 0
        assert all(torch.equal(found[0], logits) for logits in found)
        assert float((expected.log_softmax(-1) - found[0].log_softmax(-1)).abs().max()) < 3e-4
        sampled = [own.batch.sampled[rows].tolist() for own in others]
        assert all(tokens == sampled[0] for tokens in sampled)
        batch.sampled[rows] = sampled[0]
        batches.commit(batch)
    for own in others:
        assert own.step.decoder.peers is not None
        assert own.step.decoder.peers.fault.tolist() == [0, 0]
