"""The weights of an EAGLE-3 draft head, and its map from rows of the output head to tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.draft_heads import read_draft_head
from blinkpy.models.weights.checkpoint import open_checkpoint, stored_tensors
from blinkpy.models.weights.stored_tensor import StoredTensor, open_weights

if TYPE_CHECKING:
    from blinkpy.models.weights.decoder_weights import Weights

MAP = "d2t"
INTEGERS = {"I32": np.int32, "I64": np.int64}


def with_draft_head(model: DecoderDescription, folder: str | Path, *, weights: bool) -> DecoderDescription:
    """The description with the head in a folder, whose tensors are checked.

    weights: False: the checkpoint is not read, and the head uses the model's embedding if it can.
    Raises ConfigError, with the folder, if the head does not fit.
    """
    head = read_draft_head(folder, model)
    if head.inputs is None:
        raise ValueError("a head without inputs")
    try:
        found = stored_tensors(head, folder) if weights else {}
        own = f"{head.tensors.embedding}.weight" in found or head.hidden_size != model.hidden_size
        head = replace(head, inputs=replace(head.inputs, embedding=own))
        if weights:
            open_checkpoint(head, folder)
            read_head_tokens(head, folder)
    except ConfigError as error:
        raise ConfigError(f"speculative_model: {error}") from None
    return replace(model, draft_head=head)


def read_head_tokens(head: DecoderDescription, folder: str | Path) -> NDArray[np.int32]:
    """The token of each row of the head's lm_head, int32 [rows]. Raises ConfigError for a map that is missing, malformed or
    outside of the vocabulary.
    """
    rows, vocab = head.head_rows, head.vocab_size
    stored = stored_tensors(head, folder).get(MAP)
    if stored is None and rows == vocab:
        return np.arange(vocab, dtype=np.int32)
    if stored is None:
        raise ConfigError(f"{folder}: the checkpoint lacks {MAP}, which a head with {rows} of {vocab} tokens needs")
    if stored.dtype not in INTEGERS or stored.shape != (rows,):
        raise ConfigError(
            f"{stored.path}: {MAP} is {stored.dtype} {list(stored.shape)}; needed: {' or '.join(INTEGERS)} [{rows}]"
        )
    tokens = np.arange(rows) + _read(stored)
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if len(outside):
        row = int(outside[0])
        raise ConfigError(f"{stored.path}: {MAP} maps row {row} to token {tokens[row]}, but the model has {vocab} tokens")
    return tokens.astype(np.int32)


def _read(stored: StoredTensor) -> NDArray[np.int64]:
    values = np.empty(stored.shape, INTEGERS[stored.dtype])
    with open_weights(stored.path) as file:
        stored.read(values.view(np.uint8).data, file, 0, MAP)
    return values.astype(np.int64)


def load_head(head: DecoderDescription, folder: str | Path, weights: Weights, seed: int | None) -> None:
    """Add a head's weights to those of its model, in the same dtype and on the same device.

    seed: of random weights, whose rows of the output head are the first tokens; None: they are in the folder.
    Raises ConfigError, like with_draft_head.
    """
    import torch

    from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

    where = weights.dtype, str(weights.device)
    if seed is None:
        weights.draft_head = load_weights(head, folder, *where, embedding=weights.embedding)
        tokens = read_head_tokens(head, folder)
    else:
        weights.draft_head = dummy_weights(head, seed, *where, embedding=weights.embedding)
        tokens = np.arange(head.head_rows, dtype=np.int32)
    weights.head_tokens = torch.from_numpy(tokens).to(weights.device)
