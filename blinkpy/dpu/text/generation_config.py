"""generation_config.json: the defaults of requests, and a warning that names the keys without an effect.

generate() of transformers is the reference for the effects of keys, and vLLM for the rules of a server.
As in vLLM, an absent `do_sample` counts as true, and `max_length` is ignored. Every other key that changes the tokens of
transformers' generate() either sets a default here, or is in IGNORED.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETERS, RequestParameters

NAME = "generation_config.json"
# Each key sets a default of requests.
APPLIED = frozenset({"do_sample", "eos_token_id", "max_new_tokens", *(p.name for p in PARAMETERS if p.from_model)})
# Keys that change what transformers generates, with the values that don't. null and empty lists never do.
IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("max_length", "max_time", "stop_strings", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "penalty_alpha", "dola_layers", "constraints", "force_words_ids"), ()),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups", "typical_p", "top_h", "guidance_scale"), (1,)),
    "encoder_repetition_penalty": (1,),
    "token_healing": (False,),
}
# Keys without an effect on the tokens of a decoder without beams: ids that only padding or an empty prompt needs, forms of
# the result, and how transformers computes.
WITHOUT_EFFECT = frozenset(
    {
        *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "_commit_hash"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type", "is_assistant"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "prompt_lookup_num_tokens"),
        *("max_matching_ngram_size", "early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values"),
    }
)
logger = logging.getLogger("blinkpy.frontend")


def request_defaults(folder: Path, values: Mapping[str, Any]) -> RequestParameters:
    """Default parameters of requests. Logs a warning with the ignored keys.

    values: the content of a folder's generation_config.json. Raises ConfigError for a value out of range.
    """
    try:
        defaults = RequestParameters.of_model(values)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    ignored = ignored_keys(values)
    if ignored:
        logger.warning("%s: ignoring keys that have no effect on requests: %s", folder / NAME, ", ".join(ignored))
    return defaults


def longest_output(folder: Path, values: Mapping[str, Any]) -> int | None:
    """Default of a request's maximum output, in tokens, from `max_new_tokens`; None: the rest of the context.

    Raises ConfigError for a value out of range.
    """
    value = values.get("max_new_tokens")
    if value is not None and not (type(value) is int and 1 <= value <= INT32_MAX):
        raise ConfigError(f"{folder}: {NAME}: max_new_tokens must be an integer of at least 1, not {value!r:.200}")
    return value


def ignored_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys whose values would have an effect in transformers, or that transformers doesn't know either; sorted."""
    return sorted(key[:200] for key, value in values.items() if not _silent(key, value))


def _silent(key: str, value: Any) -> bool:
    if value is None or value in ([], {}) or key in APPLIED or key in WITHOUT_EFFECT:
        return True
    return key in IGNORED and value in IGNORED[key]
