"""Reads the FP8 scheme or the form of 4-bit weights in `quantization_config` of a config.json. Unsupported schemes cause an
error that names them.

Layouts: compressed-tensors (llm-compressor), transformers' and DeepSeek's "fp8", and NVIDIA's modelopt.
"""

import fnmatch
import re
from collections.abc import Callable
from typing import Any

from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.packing import Packing
from blinkpy.models.description.packing_reader import read_packing
from blinkpy.models.description.quantization import BLOCK, Quantization, Scales, any_of
from blinkpy.models.description.quantization_section import BOUNDARY, INERT_NUMBERS, NONE_AT_ALL, Section

FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors: one 8-bit number per weight
OTHER_FORMATS = {"int-quantized": "8-bit integers", "mxfp8-quantized": "MXFP8"}
INSTEAD = "use a checkpoint with FP8 weights and inputs, or the unquantised model with --quantization fp8"
WEIGHT_STRATEGIES = {"tensor": Scales.MATRIX, "channel": Scales.ROW, "block": Scales.BLOCK}
# Keys of compressed-tensors for numbers, with their only supported values; other keys must be empty.
FP8_NUMBERS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "scale_dtype": (None, "torch.float32", "torch.bfloat16", "torch.float16", "float32", "bfloat16", "float16"),
    "zp_dtype": (None, "torch.float8_e4m3fn", "float8_e4m3fn", "torch.int8", "int8"),
}


def read_quantization(c: HfConfig) -> Quantization | Packing | None:
    """The quantization of a model's linear layers, or None. Raises ConfigError for an unsupported
    quantization.
    """
    values = c.get("quantization_config")
    if values is None:
        return None
    section = Section(values, f"{c.where}: quantization_config")
    packing = read_packing(section)
    if packing is not None:
        section.check_rest()
        _check_patterns(section, packing.ignored)
        return packing
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join([*METHODS, *FOUR_BIT_METHODS])
        raise section.error(f"quant_method {str(method)[:80]!r} is not supported for {c.name} (supported: {known})")
    found = METHODS[method](section)
    section.check_rest()
    if found is not None:
        _check_patterns(section, found.ignored)
    return found


def _check_patterns(section: Section, patterns: tuple[str, ...]) -> None:
    """Raise ConfigError unless each pattern, and their union, is a regular expression."""
    for pattern in (*patterns, any_of(patterns)):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise section.error(f"{pattern[:80]!r} is not a regular expression: {error}") from None


def _fp8(section: Section) -> Quantization:
    """transformers' FineGrainedFP8, DeepSeek's and vLLM's format."""
    static = section.one_of("activation_scheme", "dynamic", "static", None) == "static"
    section.one_of("fmt", "e4m3", "float8_e4m3fn", None)
    section.one_of("scale_fmt", "float", "ue8m0", None)  # of weights; inputs keep scales of full precision
    section.one_of("expert_dtype", "fp8", None)
    blocks = section.one_of("weight_block_size", [BLOCK, BLOCK], None) is not None
    if blocks and static:
        raise section.error("activation_scheme 'static' together with weight_block_size is not supported")
    ignored = section.names("modules_to_not_convert", "ignored_layers")
    return Quantization(
        Scales.BLOCK if blocks else Scales.MATRIX,
        static,
        ignored=tuple(f"(?:{name}){BOUNDARY}" for name in ignored),
        ignored_ends=tuple(ignored),
    )


def _modelopt(section: Section) -> Quantization:
    section.one_of("quant_algo", "FP8")
    cache = section.get("kv_cache_scheme")
    if cache is not None:
        _cache_scheme(Section(cache, f"{section.where}: kv_cache_scheme"))
    section.one_of("kv_cache_quant_algo", "FP8", None)
    for key in ("producer", "quantization", "config_groups", "version"):  # repeat the same facts
        section.get(key)
    ignored = section.names("ignore", "exclude_modules")
    return Quantization(Scales.MATRIX, static=True, ignored=tuple(fnmatch.translate(name) for name in ignored))


def _compressed_tensors(section: Section) -> Quantization | None:
    section.one_of("quantization_status", "compressed", None)
    for key in ("version", "global_compression_ratio", "format"):
        section.get(key)
    sparsity = section.get("sparsity_config")
    if sparsity not in NONE_AT_ALL and Section(sparsity, f"{section.where}: sparsity_config").get("format") != "dense":
        raise section.error("sparsity_config is not supported")
    cache = section.get("kv_cache_scheme")
    if cache is not None:
        _cache_scheme(Section(cache, f"{section.where}: kv_cache_scheme"))
    ignored = section.names("ignore")
    groups = Section(section.get("config_groups") or {}, f"{section.where}: config_groups")
    if not groups.values and cache is not None:
        return None
    if len(groups.values) != 1:
        raise section.error(f"{len(groups.values)} config_groups are not supported (supported: 1)")
    name = next(iter(groups.values))
    group = Section(groups.get(name), f"{groups.where}: {name}")
    targets = group.names("targets")
    if targets != ["Linear"]:
        raise group.error(f"targets {str(targets)[:80]} are not supported (supported: ['Linear'])")
    for source in (section, group):
        found = source.values.get("format")
        if isinstance(found, str) and found in OTHER_FORMATS:
            raise source.error(f"format {found!r} ({OTHER_FORMATS[found]}) is not supported; {INSTEAD}")
        source.one_of("format", *FORMATS, *((None,) if source is group else ()))
    scales, static = _group_scheme(group)
    group.check_rest()
    patterns = tuple(name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in ignored)
    return Quantization(scales, static is True, ignored=patterns, inputs=static is not None)


def _group_scheme(group: Section) -> tuple[Scales, bool | None]:
    """Scales of the weights, and whether the scales of the inputs are static; None: inputs are not quantised."""
    weights = _numbers(group, "weights")
    scales = WEIGHT_STRATEGIES[weights.one_of("strategy", *WEIGHT_STRATEGIES)]
    weights.one_of("dynamic", False, None)
    if scales == Scales.BLOCK:
        weights.one_of("block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
    if group.get("input_activations") is None:
        return scales, None
    inputs = _numbers(group, "input_activations")
    if scales == Scales.BLOCK:
        inputs.one_of("strategy", "group")
        inputs.one_of("group_size", BLOCK)
        inputs.one_of("dynamic", True)
        return scales, False
    static = inputs.one_of("strategy", "token", "tensor") == "tensor"
    inputs.one_of("dynamic", *((False, None) if static else (True,)))
    return scales, static


def _numbers(group: Section, key: str) -> Section:
    """A group's description of 8-bit floats, for weights or inputs."""
    found = Section(group.get(key), f"{group.where}: {key}")
    for name, supported in FP8_NUMBERS.items():
        found.one_of(name, *supported)
    for name in INERT_NUMBERS:
        found.get(name)
    found.check_rest()
    return found


def _cache_scheme(scheme: Section) -> None:
    """Scales of an FP8 cache, one for keys and one for values of a layer."""
    for name, supported in {**FP8_NUMBERS, "strategy": ("tensor", None), "dynamic": (False, None)}.items():
        scheme.one_of(name, *supported)
    for name in INERT_NUMBERS:
        scheme.get(name)
    scheme.check_rest()


FOUR_BIT_METHODS = ("awq", "gptq", "auto-round")
METHODS: dict[str, Callable[[Section], Quantization | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
}
