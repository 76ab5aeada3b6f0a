"""Options of vLLM and SGLang that do not exist here, with the option to use instead, for errors about unknown options."""

_OTHER_SPLITS = "a model is split only by '--tensor-parallel-size', over GPUs of one machine"
_LORA = "adapters are not supported"
_SPECULATION = "see '--speculative', '--speculative-model' and '--speculative-tokens'"
_IMAGES = "models accept text only"
_GRAPHS = "the whole loop is one CUDA graph"
_OFFLOAD = "weights and cache stay in the GPU's memory; see '--gpu-memory-utilization'"
_CODE = "no code of a model's folder runs"
_SCHEDULER = "see '--policy'"
_PREFILL = "prompts are always processed in chunks; see '--max-num-batched-tokens'"
_DISAGGREGATION = "prompts and outputs are processed on one engine"

PEER_OPTIONS = {
    **dict.fromkeys(
        (
            "pipeline-parallel-size",
            "pp",
            "pp-size",
            "enable-expert-parallel",
            "ep-size",
            "expert-parallel-size",
            "nnodes",
            "node-rank",
            "dist-init-addr",
            "distributed-executor-backend",
            "decode-context-parallel-size",
        ),
        _OTHER_SPLITS,
    ),
    **dict.fromkeys(("tp", "tp-size"), "use '--tensor-parallel-size'"),
    **dict.fromkeys(("dp", "dp-size"), "use '--data-parallel-size'"),
    **dict.fromkeys(("mem-fraction-static", "gpu-memory-fraction"), "use '--gpu-memory-utilization'"),
    **dict.fromkeys(("context-length", "max-total-tokens", "max-seq-len"), "use '--max-model-len'"),
    **dict.fromkeys(("max-running-requests", "max-concurrency"), "use '--max-num-seqs'"),
    **dict.fromkeys(
        ("chunked-prefill-size", "enable-chunked-prefill", "max-prefill-tokens", "long-prefill-token-threshold"), _PREFILL
    ),
    **dict.fromkeys(("num-gpu-blocks-override", "max-num-pages"), "use '--num-pages'"),
    "block-size": "use '--page-size'",
    "model-path": "give the model as the first argument",
    **dict.fromkeys(
        ("tokenizer", "tokenizer-path", "tokenizer-mode", "skip-tokenizer-init"), "the tokenizer is read from the model's folder"
    ),
    **dict.fromkeys(("trust-remote-code", "hf-overrides", "json-model-override-args"), _CODE),
    **dict.fromkeys(("revision", "download-dir", "hf-token"), "download the model first, and give its folder"),
    **dict.fromkeys(
        ("enable-lora", "lora-modules", "lora-paths", "max-loras", "max-lora-rank", "max-cpu-loras"),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "speculative-config",
            "speculative-algorithm",
            "speculative-draft-model-path",
            "speculative-num-steps",
            "speculative-eagle-topk",
            "speculative-num-draft-tokens",
            "num-speculative-tokens",
        ),
        _SPECULATION,
    ),
    **dict.fromkeys(("limit-mm-per-prompt", "mm-processor-kwargs", "enable-multimodal", "language-model-only"), _IMAGES),
    **dict.fromkeys(
        (
            "enforce-eager",
            "disable-cuda-graph",
            "cuda-graph-max-bs",
            "cuda-graph-sizes",
            "compilation-config",
            "enable-torch-compile",
        ),
        _GRAPHS,
    ),
    **dict.fromkeys(("cpu-offload-gb", "swap-space", "enable-hierarchical-cache", "kv-offloading-size"), _OFFLOAD),
    **dict.fromkeys(("enable-auto-tool-choice", "tool-parser-plugin"), "tools are always on; see '--tool-call-parser'"),
    "enable-reasoning": "reasoning is always parsed; see '--reasoning-parser'",
    **dict.fromkeys(
        ("guided-decoding-backend", "grammar-backend", "structured-outputs-config"),
        "grammars have one compiler; see '--grammar-slots'",
    ),
    **dict.fromkeys(("scheduling-policy", "schedule-policy", "schedule-conservativeness", "async-scheduling"), _SCHEDULER),
    "disable-radix-cache": "use '--no-enable-prefix-caching'",
    **dict.fromkeys(
        ("attention-backend", "moe-runner-backend", "sampling-backend"), "the kernels are chosen by the model and the GPU"
    ),
    **dict.fromkeys(
        ("disable-log-requests", "disable-log-stats", "enable-log-requests", "log-requests"),
        "see '--access-log' and '--log-level'",
    ),
    **dict.fromkeys(("uvicorn-log-level", "log-level-http"), "use '--log-level'"),
    "enable-metrics": "/metrics is always on; see '--metrics-names'",
    **dict.fromkeys(("kv-transfer-config", "disaggregation-mode", "disaggregation-transfer-backend"), _DISAGGREGATION),
    **dict.fromkeys(("api-server-count", "tokenizer-worker-num"), "use '--workers'"),
    "cors-allow-origins": "use '--allowed-origins'",
    **dict.fromkeys(("random-seed",), "use '--seed'"),
    **dict.fromkeys(("runner", "task", "convert", "is-embedding"), "models generate text only"),
    "kv-cache-metrics": "see '--metrics-names'",
    "quantization-param-path": "scales are read from the model's folder",
    "generation-config": "defaults come from the model's generation_config.json",
    "override-generation-config": "set sampling parameters in requests",
    "default-chat-template-kwargs": "set 'chat_template_kwargs' in requests",
    "response-role": "answers have the role 'assistant'",
    "return-tokens-as-token-ids": "see /tokenize",
}
