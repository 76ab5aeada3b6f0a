"""Typed look-ups in a Hugging Face config.json, with errors that name the key.

It records which keys were read. An unread key that changes the computation is refused; an unknown key causes a warning.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from blinkpy.config import ConfigError

logger = logging.getLogger("blinkpy.engine")
LARGEST = 1e38  # about the largest float32
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Values of missing keys in most families."""

MOST = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 16,
    "num_experts_per_tok": 1 << 10,
    "vocab_size": 1 << 24,
}
"""Numbers that make something large have limits far above any model's: a config.json is a stranger's."""

_UNSUPPORTED: list[tuple[tuple[Any, ...], str]] = [
    ((None,), "quantization_config compression_config query_pre_attn_scalar attention_multiplier clip_qkv vision_config"),
    ((None,), "attention_chunk_size sliding_window"),
    ((None, 0), "attn_logit_softcapping final_logit_softcapping shared_expert_intermediate_size n_shared_experts"),
    ((None, 1), "logit_scale logits_scaling embedding_multiplier residual_multiplier"),
    ((None, False), "alibi qk_layernorm is_encoder_decoder add_cross_attention attention_bias mlp_bias lm_head_bias"),
    ((None, False), "use_mrope rope_interleaved use_bidirectional_attention qkv_bias"),
    ((None, []), "no_rope_layers"),
]
NEUTRAL: dict[str, tuple[Any, ...]] = {key: values for values, keys in _UNSUPPORTED for key in keys.split()}
"""Options that change the computation. If a family does not read one of them, all other values are refused."""

_INERT = """
    architectures model_type auto_map torch_dtype dtype transformers_version use_cache initializer_range attention_dropout
    hidden_dropout pretraining_tp bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    tokenizer_class prefix return_dict output_hidden_states output_attentions output_scores torchscript use_bfloat16
    tf_legacy_loss pruned_heads is_decoder cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward max_length
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens finetuning_task id2label label2id task_specific_params problem_type
    max_sequence_length model_max_length seq_length use_sliding_window max_window_layers transformers.js_config unsloth_fixed
    unsloth_version original_max_position_embeddings"""
INERT = frozenset(_INERT.split())
"""Keys of known configs that do not change the computation, or not by themselves."""
_warned: set[str] = set()


class HfConfig(Mapping[str, Any]):
    """A config.json, or one of its sections, called `where` in errors.

    name: the model class.
    defaults: values of missing keys.
    """

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config.json"):
        self.name = name
        self.where = where
        self._values = values
        self._defaults = defaults
        self._read: set[str] = set()
        self._sections: list[tuple[HfConfig, tuple[str, ...]]] = []

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key] if key in self._values else self._defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _first(self, names: tuple[str, ...], default: Any) -> Any:
        """The value of the first name that is present and not null, else its default in the format, else
        `default`.
        """
        self._read.update(names)
        found = [source.get(name) for source in (self._values, self._defaults) for name in names]
        value = next((value for value in found if value is not None), default)
        if value is None:
            raise ConfigError(f"{self.where}: {names[0]} is missing")
        return value

    def is_null(self, name: str) -> bool:
        """Whether the key is present and null, for which transformers does not always use the default."""
        return self.get(name, 0) is None and name in self._values

    def given(self, name: str) -> Any:
        """The value, or the default if it is missing or null."""
        value = self.get(name)
        return self._defaults.get(name) if value is None else value

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
        """The value of the first name that has one, or the default. Without a default, a value is
        required.
        """
        value, high = self._first(names, default), min(high, MOST.get(names[0], high))
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{self.where}: {names[0]} must be an integer from {low} to {high}, not {value!r:.80}")
        return value

    def number(self, name: str, default: float | None = None, below: float = LARGEST) -> float:
        """A number above 0. Without a default, a value is required."""
        value = self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < below:
            limit = "" if below == LARGEST else f" and below {below:g}"
            raise ConfigError(f"{self.where}: {name} must be a number above 0{limit}, not {value!r:.80}")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; False if it is missing or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false, not {value!r:.80}")
        return bool(value)

    def section(
        self,
        key: str,
        inherits: tuple[str, ...],
        defaults: Mapping[str, Any],
        values: Mapping[str, Any] | None = None,
        ignores: tuple[str, ...] = (),
    ) -> "HfConfig":
        """A nested object, whose keys are checked together with this object's keys.

        inherits: keys whose value in this object has priority.
        values: the section's values, if they differ from those of `key`.
        ignores: keys without an effect in the section.
        """
        values = self.get(key) if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, not {str(values)[:80]}")
        outer = {name: self._values[name] for name in inherits if self._values.get(name) is not None}
        self._read.update(inherits)
        section = HfConfig(self.name, {**values, **outer}, {**DEFAULTS, **defaults}, f"{self.where}: {key}")
        section._read.update(outer)
        self._sections.append((section, ignores))
        return section

    def having(self, key: str) -> "HfConfig":
        """The part that has a value for a key: this object or one of its sections, and otherwise this object."""
        parts = [self, *(section for section, _ in self._sections)]
        return next((part for part in parts if part._values.get(key) is not None), self)

    def check_rest(self, ignores: tuple[str, ...]) -> None:
        """Raise ConfigError for an unread key that changes the computation; warn once of each unknown key.

        ignores: keys without an effect in this family.
        """
        for section, own in self._sections:
            section.check_rest((*ignores, *own))
        rest = set(self._values) - self._read - set(ignores)
        for key in sorted(rest & set(NEUTRAL)):
            if self._values[key] not in NEUTRAL[key]:
                raise ConfigError(f"{self.where}: {key} is not supported for {self.name} (found {str(self._values[key])[:80]})")
        unknown = sorted(key for key in rest - set(NEUTRAL) - INERT - _warned if not key.startswith("_"))
        if unknown:
            logger.warning("%s: ignoring keys that are unknown for %s: %s", self.where, self.name, ", ".join(unknown)[:300])
            _warned.update(unknown)
