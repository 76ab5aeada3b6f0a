"""Options of `blinkpy check-model`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import check_value, option


@dataclass(frozen=True)
class CheckModelOptions:
    """The model, and the options that it would be served with. Only config.json, tokenizer and weight headers are read."""

    model: str = option("demo", "folder, or Hugging Face hub id; only small files are downloaded")
    dtype: str = option("auto", "same as for blinkpy serve", choices=("auto", "float32", "bfloat16"))
    quantization: str = option("auto", "same as for blinkpy serve", choices=("auto", "fp8"))
    max_model_len: int = option(0, "same as for blinkpy serve", low=0, high=1 << 22)
    gpu_memory_utilization: float = option(0.9, "same as for blinkpy serve", low=0.05, high=0.98)
    slots: int = option(256, "same as for blinkpy serve", low=1, high=65535)
    window_cache: str = option("full", "same as for blinkpy serve", choices=("full", "ring"))
    kv_cache_dtype: str = option("auto", "same as for blinkpy serve", choices=("auto", "fp8_e4m3"))
    gpu_gib: float = option(0.0, "memory of a hypothetical additional GPU, in GiB (0: none)", low=0, high=4096)
    json: bool = option(False, "print the result as JSON")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
