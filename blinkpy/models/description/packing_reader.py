"""`quantization_config` of a config.json that names 4-bit weights: compressed-tensors, AWQ, GPTQ, AutoRound, modelopt."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from blinkpy.models.description.packing import Layout, Packing
from blinkpy.models.description.quantization_section import BOUNDARY, INERT_NUMBERS, NONE_AT_ALL, Section

GROUPS = (16, 32, 64, 128)
NVFP4_GROUP = 16
MXFP4_GROUP = 32
FOUR_BITS = {
    "pack-quantized": Layout.COMPRESSED,
    "nvfp4-pack-quantized": Layout.NVFP4,
    "mxfp4-pack-quantized": Layout.MXFP4,
}
INERT_GPTQ = """
    damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name quant_method meta
    quantizer tokenizer dataset batch_size block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    use_cuda_fp16 model_seqlen exllama_config max_input_length use_exllama cache_block_outputs pad_token_id version backend
    disable_exllama lm_head mse"""
INERT_ROUND = """
    quant_method amp autoround_version batch_size data_type enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr nsamples quant_block_list scale_dtype seqlen supported_types
    train_bs act_bits act_data_type act_dynamic act_group_size act_sym super_bits super_group_size block_name_to_quantize
    to_quant_block_names enable_alg_ext"""


def read_packing(section: Section) -> Packing | None:
    """The 4-bit form that the section names; None if it names a form that is not 4-bit. Raises ConfigError for an unsupported
    form.
    """
    method = section.values.get("quant_method")
    if method == "awq":
        return _awq(section)
    if method == "gptq":
        return _gptq(section)
    if method in ("auto-round", "auto_round"):
        return _auto_round(section)
    if method == "modelopt" and section.values.get("quant_algo") == "NVFP4":
        return _modelopt(section)
    if method == "compressed-tensors" and _compressed_format(section) in FOUR_BITS:
        return _compressed(section)
    return None


def _group(section: Section) -> int:
    """Inputs that share a scale; 0: a whole row."""
    size = section.one_of("group_size", *GROUPS, -1)
    return 0 if size == -1 else int(size)


def _names(section: Section, *keys: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns and suffixes of the names of unquantised modules."""
    names = section.names(*keys)
    return tuple(f"(?:.*\\.)?(?:{re.escape(name)}){BOUNDARY}" for name in names), tuple(names)


def _awq(section: Section) -> Packing:
    section.get("quant_method")
    section.one_of("bits", 4)
    section.one_of("version", "gemm", "GEMM", None)
    section.one_of("zero_point", True)
    section.one_of("backend", "autoawq", None)
    for key in ("do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"):
        section.get(key)
    ignored, ends = _names(section, "modules_to_not_convert")
    return Packing(Layout.AWQ, _group(section), zeros=True, ignored=ignored, ignored_ends=ends)


def _gptq(section: Section) -> Packing:
    section.one_of("bits", 4)
    form = section.one_of("checkpoint_format", "gptq", "gptq_v2", None)
    section.one_of("pack_dtype", "int32", None)
    other = section.one_of("format", "gptq", "gptq_v2", None)
    if form and other and form != other:
        raise section.error(f"checkpoint_format {form!r} and format {other!r} contradict each other: remove the wrong entry")
    form = form or other or "gptq"
    ordered = section.one_of("desc_act", True, False, None) is True
    section.one_of("sym", True, False, None)
    section.one_of("dynamic", {}, None)
    for key in INERT_GPTQ.split():
        section.get(key)
    ignored, ends = _names(section, "modules_to_not_convert")
    offset = 0 if form == "gptq_v2" else 1
    return Packing(Layout.GPTQ, _group(section), True, ordered, offset, ignored, ends)


def _auto_round(section: Section) -> Packing:
    section.one_of("bits", 4)
    form = section.one_of("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq", None)
    section.one_of("sym", True, False, None)
    section.one_of("backend", "auto", "auto_round:auto_gptq", "auto_round:auto_awq", None)
    if section.values.get("act_bits") not in (None, 16, 32):
        raise section.error(f"act_bits {section.values['act_bits']!r:.80} is not supported (supported: 16)")
    for key in INERT_ROUND.split():
        section.get(key)
    unquantised = []
    extra = section.get("extra_config") or {}
    for name, changes in extra.items() if isinstance(extra, Mapping) else ():
        if not isinstance(changes, Mapping) or changes.get("bits") not in (16, 32):
            raise section.error(f"extra_config of {name!r:.80} is not supported (supported: bits 16)")
        unquantised.append(str(name))
    ignored, ends = _names(section, "modules_to_not_convert")
    ignored += tuple(f"(?:.*\\.)?(?:{re.escape(name)})$" for name in unquantised)
    if form == "auto_round:auto_awq":
        return Packing(Layout.AWQ, _group(section), True, ignored=ignored, ignored_ends=ends)
    return Packing(Layout.GPTQ, _group(section), True, zero_offset=1, ignored=ignored, ignored_ends=ends)


def _modelopt(section: Section) -> Packing:
    section.one_of("quant_algo", "NVFP4")
    section.one_of("group_size", NVFP4_GROUP, None)
    section.one_of("kv_cache_quant_algo", "FP8", None)
    for key in ("quant_method", "producer", "quantization", "config_groups", "version", "kv_cache_scheme"):
        section.get(key)
    ignored = tuple(fnmatch.translate(name) for name in section.names("ignore", "exclude_modules"))
    return Packing(Layout.MODELOPT, NVFP4_GROUP, ignored=ignored)


def _compressed_groups(section: Section) -> Mapping[str, Any]:
    groups = section.values.get("config_groups")
    return groups if isinstance(groups, Mapping) else {}


def _compressed_format(section: Section) -> str:
    """The format of the section, or that of its only group."""
    formats = [
        section.values.get("format"),
        *(g.get("format") for g in _compressed_groups(section).values() if isinstance(g, Mapping)),
    ]
    return next((str(one) for one in formats if isinstance(one, str) and one in FOUR_BITS), "")


def _compressed(section: Section) -> Packing:
    layout = FOUR_BITS[_compressed_format(section)]
    section.one_of("quantization_status", "compressed", None)
    for key in ("quant_method", "version", "global_compression_ratio", "format", "kv_cache_scheme", "transform_config"):
        section.get(key)
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = section.get(key)
        if value not in NONE_AT_ALL and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise section.error(f"{key} is not supported with 4-bit weights")
    groups = Section(section.get("config_groups") or {}, f"{section.where}: config_groups")
    if len(groups.values) != 1:
        raise section.error(f"{len(groups.values)} config_groups are not supported (supported: 1)")
    name = next(iter(groups.values))
    group = Section(groups.get(name), f"{groups.where}: {name}")
    if group.names("targets") != ["Linear"]:
        raise group.error(f"targets {str(group.values.get('targets'))[:80]} are not supported (supported: ['Linear'])")
    if group.one_of("format", *FOUR_BITS, None) not in (None, next(name for name, one in FOUR_BITS.items() if one == layout)):
        raise group.error(f"format {group.values['format']!r} contradicts that of the section: remove the wrong entry")
    weights = Section(group.get("weights"), f"{group.where}: weights")
    weights.one_of("num_bits", 4)
    weights.one_of("dynamic", False, None)
    for key in INERT_NUMBERS - {"strategy", "group_size", "dynamic"} | {"scale_dtype", "zp_dtype"}:
        weights.get(key)
    patterns = tuple(one[3:] if one.startswith("re:") else f"{re.escape(one)}$" for one in section.names("ignore"))
    read = {Layout.NVFP4: _nvfp4, Layout.MXFP4: _mxfp4}.get(layout, _integers)
    found = read(group, weights, patterns)
    weights.check_rest()
    group.check_rest()
    return found


def _integers(group: Section, weights: Section, ignored: tuple[str, ...]) -> Packing:
    if group.get("input_activations") is not None:
        raise group.error("4-bit weights with quantised inputs are not supported")
    group.get("output_activations")
    weights.one_of("type", "int", None)
    symmetric = weights.one_of("symmetric", True, False, None) is not False
    strategy = weights.one_of("strategy", "group", "channel")
    order = weights.one_of("actorder", "group", "weight", "static", "dynamic", None)
    size = 0 if strategy == "channel" else _group(weights)
    weights.get("group_size")
    ordered = order in ("group", "dynamic") and size > 0
    return Packing(Layout.COMPRESSED, size, not symmetric, ordered, ignored=ignored)


def _nvfp4(group: Section, weights: Section, ignored: tuple[str, ...]) -> Packing:
    return _e2m1(Layout.NVFP4, "tensor_group", NVFP4_GROUP, group, weights, ignored)


def _mxfp4(group: Section, weights: Section, ignored: tuple[str, ...]) -> Packing:
    return _e2m1(Layout.MXFP4, "group", MXFP4_GROUP, group, weights, ignored)


def _e2m1(layout: Layout, strategy: str, size: int, group: Section, weights: Section, ignored: tuple[str, ...]) -> Packing:
    group.get("input_activations")
    group.get("output_activations")
    weights.one_of("type", "float")
    weights.one_of("symmetric", True, None)
    weights.one_of("strategy", strategy)
    weights.one_of("group_size", size)
    weights.one_of("actorder", None)
    return Packing(layout, size, ignored=ignored)
