"""One model on several ranks, each with a part of every layer (tensor parallelism, Shoeybi et al., arXiv 1909.08053).

Attention is split by heads, an MLP and each expert by width, and the output head by tokens of the vocabulary. So a
layer needs two sums over the ranks: after attention's last projection, and after the MLP or the experts. Norms, routers
and the embedding are whole on every rank. With fewer key heads than ranks, neighbouring ranks have the same key head.
"""

from dataclasses import replace
from typing import NamedTuple

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Attention, Experts, Layer, Mlp, QkNorm
from blinkpy.models.description.decoder_description import DecoderDescription

HEAD_UNIT = 8
"""Rows of the output head: all ranks but the last have a multiple of it."""
MXFP4_BLOCK = 32  # weights that share a scale


class Share(NamedTuple):
    """The part of a model that one rank has. rank: its number, from 0. ranks: the number of ranks."""

    rank: int = 0
    ranks: int = 1

    def first(self, whole: int, own: int) -> int:
        """The first of this rank's `own` rows or columns of `whole`. With fewer parts than ranks, neighbours share one."""
        return self.rank * (whole // own) // self.ranks * own

    def head(self, vocab_size: int) -> range:
        """This rank's rows of the output head."""
        borders = [vocab_size * rank // self.ranks // HEAD_UNIT * HEAD_UNIT for rank in range(self.ranks)]
        return range(*[*borders, vocab_size][self.rank : self.rank + 2])


WHOLE = Share()
"""The share of a model on one rank."""


def split_model(model: DecoderDescription, share: Share) -> DecoderDescription:
    """A rank's own description: its heads, widths and rows of the output head; the rest is unchanged.

    Raises ConfigError with the layer that can't be split.
    """
    if share.ranks == 1:
        return model
    if model.draft_head is not None:
        raise ConfigError(f"{model.name} with a draft head can't be split over {share.ranks} ranks: leave out speculative_model")
    if model.vocab_size < HEAD_UNIT * share.ranks:
        raise ConfigError(f"{model.name} can't be split over {share.ranks} ranks: its vocabulary has {model.vocab_size} tokens")
    layers = tuple(_split_layer(model, number, share.ranks) for number in range(len(model.layers)))
    return replace(model, layers=layers, head_rows=len(share.head(model.vocab_size)))


def _split_layer(model: DecoderDescription, number: int, ranks: int) -> Layer:
    layer = model.layers[number]
    lacking = _unsupported(model, layer) or _undivided(layer.attention, layer.mlp, ranks)
    if lacking or layer.mlp is None:
        raise ConfigError(f"layer {number} of {model.name} can't be split over {ranks} ranks: {lacking}")
    attention, mlp = layer.attention, layer.mlp
    mlp = mlp._replace(size=mlp.size // ranks)
    if isinstance(mlp, Experts):
        mlp = mlp._replace(shared=mlp.shared // ranks)
    own = attention._replace(heads=attention.heads // ranks, kv_heads=max(1, attention.kv_heads // ranks))
    return layer._replace(attention=own, mlp=mlp)


def _unsupported(model: DecoderDescription, layer: Layer) -> str:
    """Why a layer's blocks can't be split, or ""."""
    if layer.recurrence is not None:
        return "recurrent states are not supported on several ranks"
    if not model.gated:
        return "MLPs without a gate are not supported on several ranks"
    if model.layer_inputs:
        return "embeddings of layers are not supported on several ranks"
    if layer.attention.keys_of is not None:
        return f"it reads the keys of layer {layer.attention.keys_of}, which is not supported on several ranks"
    if layer.attention.latent:
        return "latent attention is not supported on several ranks"
    if layer.attention.qk_norm == QkNorm.WIDTH:
        return "its norm of queries and keys is over all heads together, which would need another sum"
    return ""


def _undivided(attention: Attention, mlp: Mlp | Experts | None, ranks: int) -> str:
    """The size in a layer that is not divisible by the number of ranks, or ""."""
    if attention.heads % ranks:
        return f"it has {attention.heads} query heads"
    if attention.kv_heads % ranks and ranks % attention.kv_heads:
        return f"it has {attention.kv_heads} key heads, neither a multiple nor a divisor of {ranks}"
    if mlp is None:
        return "it has no MLP"
    if isinstance(mlp, Mlp):
        return f"its MLP has the width {mlp.size}" if mlp.size % ranks else ""
    if mlp.size % ranks:
        return f"its experts have the width {mlp.size}"
    if mlp.shared % ranks:
        return f"its shared expert has the width {mlp.shared}"
    if mlp.mxfp4 and mlp.size // ranks % MXFP4_BLOCK:
        return f"a rank's {mlp.size // ranks} columns of its experts are not whole blocks of {MXFP4_BLOCK} MXFP4 weights"
    return ""
