"""Fields of other servers' and services' APIs that do not exist here, with the field or option to use instead.

The names are those of SGLang, llama.cpp, Ollama, text-generation-inference, Mistral's and OpenRouter's APIs, and of Transformers.
An error about an unknown field looks here first, since a similar spelling is often a different field.
"""

_TEMPLATE = "set it in 'chat_template_kwargs'"
_REASONING = "use 'reasoning_effort', or a variable of the model's template in 'chat_template_kwargs'"
_FILTERS = "this sampling filter is not implemented; use 'top_p', 'top_k' or 'min_p'"
_CACHE = "prefixes are always cached"
_BEAMS = "beam search is not implemented"
_LORA = "adapters are not supported"
_DISAGGREGATION = "prompts are not processed on other servers"
_ROUTES = "this server has one model"
_OPTIONS = "set its entries at the top level of the body"

PEER_FIELDS = {
    # SGLang
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "max_length", "max_output_length"), "use 'max_tokens'"),
    "min_new_tokens": "use 'min_tokens'",
    "sampling_params": _OPTIONS,
    "sampling_seed": "use 'seed'",
    "input_ids": "send token ids as 'prompt' to /v1/completions",
    **dict.fromkeys(("text_inputs", "inputs"), "use 'prompt'"),
    "rid": "use 'request_id'",
    "regex": "use 'structured_outputs': {\"regex\": ...}",
    "json_schema": "use 'response_format'",
    "ebnf": "use a JSON Schema or a regular expression: see 'structured_outputs'",
    "stop_regex": "use 'stop', or a grammar: see 'structured_outputs'",
    "no_stop_trim": "use 'include_stop_str_in_output'",
    "separate_reasoning": "use 'include_reasoning'; '--reasoning-parser none' leaves reasoning in the text",
    "stream_reasoning": "reasoning is always streamed",
    "return_hidden_states": "hidden states are not returned",
    "custom_logit_processor": "clients can't send code; see 'logit_bias'",
    "custom_params": "clients can't send code",
    **dict.fromkeys(("lora_path", "lora_request", "lora_name", "adapter_id"), _LORA),
    **dict.fromkeys(("return_logprob", "top_logprobs_num", "n_probs", "decoder_input_details"), "use 'logprobs'"),
    "logprob_start_len": "use 'prompt_logprobs'",
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), _DISAGGREGATION),
    "data_parallel_rank": "the server chooses the engine",
    "extra_key": "use 'cache_salt'",
    # llama.cpp
    "grammar": "use a JSON Schema or a regular expression: see 'structured_outputs'",
    "repeat_penalty": "use 'repetition_penalty'",
    **dict.fromkeys(
        (
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
            "typical_p",
            "tfs_z",
            "top_a",
            "dry_multiplier",
            "dry_base",
            "xtc_probability",
            "xtc_threshold",
            "dynatemp_range",
            "epsilon_cutoff",
            "eta_cutoff",
            "top_n_sigma",
        ),
        _FILTERS,
    ),
    **dict.fromkeys(("cache_prompt", "id_slot", "n_keep", "use_cache"), _CACHE),
    "samplers": "the order of the filters is fixed",
    "penalty_alpha": _FILTERS,
    # Ollama
    "options": _OPTIONS,
    "keep_alive": "the model stays loaded",
    "num_ctx": "set '--max-model-len' when the server starts",
    "format": "use 'response_format'",
    **dict.fromkeys(("think", "thinking", "enable_thinking", "reasoning_budget"), _REASONING),
    # text-generation-inference and Transformers
    "parameters": _OPTIONS,
    "generation_config": _OPTIONS,
    "do_sample": "use 'temperature': 0 for greedy sampling",
    "details": "use 'logprobs'",
    **dict.fromkeys(("num_beams", "beam_width", "diversity_penalty"), _BEAMS),
    "num_return_sequences": "use 'n'",
    # services
    "extra_body": _OPTIONS,
    "random_seed": "use 'seed'",
    "safe_prompt": "add instructions to the messages",
    "prompt_mode": _TEMPLATE,
    **dict.fromkeys(("provider", "models", "route", "transforms", "plugins"), _ROUTES),
    "usage": "use 'stream_options': {\"include_usage\": true}",
    "system": "send a message with the role 'system'; /v1/messages has this field",
    "stop_sequences": "use 'stop'",
    "max_completion_length": "use 'max_completion_tokens'",
}
