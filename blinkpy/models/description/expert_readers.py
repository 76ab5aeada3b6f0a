"""Experts from a config.json, as most families spell them."""

from collections.abc import Sequence
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import activation, gated_mlp
from blinkpy.models.description.blocks import Experts, Mlp, RouterKind
from blinkpy.models.description.hf_config import HfConfig

DENSE, SPARSE = "dense", "sparse"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys, one in each family


def routed_experts(c: HfConfig, size: str, router: RouterKind, *, normalize: bool, **more: Any) -> Experts:
    """The experts of a layer. size: the key in config.json of their width. more: additional fields of Experts."""
    count, top_k = c.integer(*COUNTS, low=0), c.integer("num_experts_per_tok", "moe_k")
    if 0 < count < top_k:
        raise ConfigError(f"config.json: num_experts_per_tok ({top_k}) is above num_experts ({count})")
    return Experts(count, top_k, c.integer(size), router, activation(c), normalize, **more)


def strided_experts(c: HfConfig, experts: Experts) -> list[Mlp | Experts]:
    """Experts in each layer whose number, from 1, is a multiple of decoder_sparse_step, except mlp_only_layers."""
    layers, stride, dense = c.integer("num_hidden_layers"), c.integer("decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers below {layers}, not {dense!r:.200}")
    chosen = [experts.number > 0 and i not in dense and (i + 1) % stride == 0 for i in range(layers)]
    return [experts if has_experts else gated_mlp(c) for has_experts in chosen]


def leading_dense(c: HfConfig, experts: Mlp | Experts) -> list[Mlp | Experts]:
    """Dense MLPs in the first `first_k_dense_replace` layers, experts in the others."""
    layers, dense = c.integer("num_hidden_layers"), c.integer("first_k_dense_replace", low=0)
    return [gated_mlp(c) if layer < dense else experts for layer in range(layers)]


def typed_mlps(c: HfConfig, experts: Experts, default: Sequence[str]) -> list[Mlp | Experts]:
    """The MLP or experts of each layer, by `mlp_layer_types`. default: the kinds if that key is missing."""
    kinds = c.get("mlp_layer_types")
    kinds = list(default) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != len(default) or not all(kind in (DENSE, SPARSE) for kind in kinds):
        raise ConfigError(
            f"{c.where}: mlp_layer_types must be a list of {len(default)} entries, each {DENSE} or {SPARSE}, not {kinds!r:.200}"
        )
    return [experts if kind == SPARSE else gated_mlp(c) for kind in kinds]


def biased_sigmoid_experts(c: HfConfig, *, shared: int, factor: float, normalize: bool) -> Experts:
    """The routing of DeepSeek-V3: sigmoids, a bias for the choice, and groups of experts (`n_group`, `topk_group`).

    shared: width of the MLP that all tokens visit. factor, normalize: applied to the shares.
    """
    groups, kept = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    experts = routed_experts(
        c, "moe_intermediate_size", RouterKind.SIGMOID_TOP_K, normalize=normalize, shared=shared, factor=factor,
        groups=groups, kept_groups=kept,
    )  # fmt: skip
    size, rest = divmod(experts.number, groups)
    if rest or kept > groups or (groups > 1 and size < 2) or kept * size < experts.top_k:
        raise ConfigError(
            f"{c.where}: n_group {groups} and topk_group {kept} do not fit "
            f"{experts.number} experts with {experts.top_k} per token"
        )
    return experts if groups > kept else experts._replace(groups=1, kept_groups=1)
