"""Options of `blinkpy check-model`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import check_value, option


@dataclass(frozen=True)
class CheckModelOptions:
    """What is looked at; config.json, tokenizer and headers alone are read."""

    model: str = option("demo", "folder, or Hugging Face hub id, of which only small files are fetched")
    dtype: str = option("auto", "as the server's option of this name", choices=("auto", "float32", "bfloat16"))
    quantization: str = option("auto", "as the server's option of this name", choices=("auto", "fp8"))
    max_model_len: int = option(0, "as the server's option of this name", low=0, high=1 << 22)
    gpu_memory_utilization: float = option(0.9, "as the server's option of this name", low=0.05, high=0.98)
    slots: int = option(256, "as the server's option of this name", low=1, high=65535)
    window_cache: str = option("full", "as the server's option of this name", choices=("full", "ring"))
    kv_cache_dtype: str = option("auto", "as the server's option of this name", choices=("auto", "fp8_e4m3"))
    gpu_gib: float = option(0.0, "memory of one more GPU, GiB (0: none)", low=0, high=4096)
    json: bool = option(False, "print JSON")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
