"""Reads the FP8 scheme of `quantization_config` in a config.json. Other schemes are refused by name.

Layouts: compressed-tensors (llm-compressor), transformers' and DeepSeek's "fp8", and NVIDIA's modelopt.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.blocks import BLOCK, Quantization, Scales, joined

MOST_IGNORED, LONGEST_IGNORED = 1 << 16, 1000  # entries of an ignore list, and characters of one
FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors: one 8-bit number per weight
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name
NONE_AT_ALL: tuple[Any, ...] = (None, False, [], {}, "")
WEIGHT_STRATEGIES = {"tensor": Scales.MATRIX, "channel": Scales.ROW, "block": Scales.BLOCK}
# Keys of compressed-tensors for numbers, with their only supported values; other keys must be empty.
FP8_NUMBERS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "scale_dtype": (None, "torch.float32", "torch.bfloat16", "torch.float16", "float32", "bfloat16", "float16"),
    "zp_dtype": (None, "torch.float8_e4m3fn", "float8_e4m3fn", "torch.int8", "int8"),
}
INERT_NUMBERS = {"observer", "observer_kwargs", "strategy", "dynamic", "group_size", "block_structure"}


class _Section:
    """An object of the section, which records the keys that were read."""

    def __init__(self, values: Any, where: str):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be an object, not {str(values)[:80]}")
        self.values, self.where, self._known = values, where, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self._known.add(key)
        return self.values.get(key, default)

    def one_of(self, key: str, *supported: Any) -> Any:
        """The value of a key, which must be one of the supported ones; None if it is missing."""
        value = self.get(key)
        if not any(value == some and type(value) is type(some) for some in supported):
            listed = ", ".join("nothing" if some is None else str(some) for some in supported)
            raise self.error(f"{key} {str(value)[:80]!r} is not supported (supported: {listed})")
        return value

    def names(self, *keys: str) -> list[str]:
        """The entries of all these lists."""
        found = [entry for key in keys for entry in _list(self.get(key), f"{self.where}: {key}")]
        if len(found) > MOST_IGNORED or any(not _is_name(name) for name in found):
            raise self.error(f"{keys[0]} must be at most {MOST_IGNORED} names of 1 to {LONGEST_IGNORED} characters")
        return found

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def check_rest(self) -> None:
        """Raise ConfigError for an unread key with a value."""
        unknown = sorted(key for key in self.values if key not in self._known and self.values[key] not in NONE_AT_ALL)
        if unknown:
            raise self.error(f"{', '.join(unknown)[:200]} not supported")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_IGNORED


def _list(value: Any, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {str(value)[:80]}")
    return value or []


def read_quantization(c: HfConfig) -> Quantization | None:
    """The quantization of a model's linear layers, or None. Raises ConfigError for an unsupported
    quantization.
    """
    values = c.get("quantization_config")
    if values is None:
        return None
    section = _Section(values, f"{c.where}: quantization_config")
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise section.error(f"quant_method {str(method)[:80]!r} is not supported for {c.name} (supported: {', '.join(METHODS)})")
    found = METHODS[method](section)
    section.check_rest()
    if found is not None:
        _check_patterns(section, found.ignored)
    return found


def _check_patterns(section: _Section, patterns: tuple[str, ...]) -> None:
    """Raise ConfigError unless each pattern, and their union, is a regular expression."""
    for pattern in (*patterns, joined(patterns)):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise section.error(f"{pattern[:80]!r} is not a regular expression: {error}") from None


def _fp8(section: _Section) -> Quantization:
    """transformers' FineGrainedFP8, DeepSeek's and vLLM's format."""
    static = section.one_of("activation_scheme", "dynamic", "static", None) == "static"
    section.one_of("fmt", "e4m3", "float8_e4m3fn", None)
    section.one_of("scale_fmt", "float", None)
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


def _modelopt(section: _Section) -> Quantization:
    section.one_of("quant_algo", "FP8")
    cache = section.get("kv_cache_scheme")
    if cache is not None:
        _cache_scheme(_Section(cache, f"{section.where}: kv_cache_scheme"))
    section.one_of("kv_cache_quant_algo", "FP8", None)
    for key in ("producer", "quantization", "config_groups", "version"):  # repeat the same facts
        section.get(key)
    ignored = section.names("ignore", "exclude_modules")
    return Quantization(Scales.MATRIX, static=True, ignored=tuple(fnmatch.translate(name) for name in ignored))


def _compressed_tensors(section: _Section) -> Quantization | None:
    section.one_of("quantization_status", "compressed", None)
    for key in ("version", "global_compression_ratio", "format"):
        section.get(key)
    sparsity = section.get("sparsity_config")
    if sparsity not in NONE_AT_ALL and _Section(sparsity, f"{section.where}: sparsity_config").get("format") != "dense":
        raise section.error("sparsity_config is not supported")
    cache = section.get("kv_cache_scheme")
    if cache is not None:
        _cache_scheme(_Section(cache, f"{section.where}: kv_cache_scheme"))
    ignored = section.names("ignore")
    groups = _Section(section.get("config_groups") or {}, f"{section.where}: config_groups")
    if not groups.values and cache is not None:
        return None
    if len(groups.values) != 1:
        raise section.error(f"{len(groups.values)} config_groups are not supported (supported: 1)")
    name = next(iter(groups.values))
    group = _Section(groups.get(name), f"{groups.where}: {name}")
    targets = group.names("targets")
    if targets != ["Linear"]:
        raise group.error(f"targets {str(targets)[:80]} are not supported (supported: ['Linear'])")
    for source in (section, group):
        source.one_of("format", *FORMATS, *((None,) if source is group else ()))
    scales, static = _group_scheme(group)
    group.check_rest()
    patterns = tuple(name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in ignored)
    return Quantization(scales, static, ignored=patterns)


def _group_scheme(group: _Section) -> tuple[Scales, bool]:
    """Scales of the weights, and whether the scales of the inputs are static."""
    weights = _numbers(group, "weights")
    scales = WEIGHT_STRATEGIES[weights.one_of("strategy", *WEIGHT_STRATEGIES)]
    weights.one_of("dynamic", False, None)
    if scales == Scales.BLOCK:
        weights.one_of("block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
    if group.values.get("input_activations") is None:
        raise group.error("8-bit weights with unquantised inputs are not supported")
    inputs = _numbers(group, "input_activations")
    if scales == Scales.BLOCK:
        inputs.one_of("strategy", "group")
        inputs.one_of("group_size", BLOCK)
        inputs.one_of("dynamic", True)
        return scales, False
    static = inputs.one_of("strategy", "token", "tensor") == "tensor"
    inputs.one_of("dynamic", *((False, None) if static else (True,)))
    return scales, static


def _numbers(group: _Section, key: str) -> _Section:
    """A group's description of 8-bit floats, for weights or inputs."""
    found = _Section(group.get(key), f"{group.where}: {key}")
    for name, supported in FP8_NUMBERS.items():
        found.one_of(name, *supported)
    for name in INERT_NUMBERS:
        found.get(name)
    found.check_rest()
    return found


def _cache_scheme(scheme: _Section) -> None:
    """Scales of an FP8 cache, one for keys and one for values of a layer."""
    for name, supported in {**FP8_NUMBERS, "strategy": ("tensor", None), "dynamic": (False, None)}.items():
        scheme.one_of(name, *supported)
    for name in INERT_NUMBERS:
        scheme.get(name)
    scheme.check_rest()


METHODS: dict[str, Callable[[_Section], Quantization | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
}
