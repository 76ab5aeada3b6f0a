"""A digest that distinguishes engines with different weights, without reading all weights."""

import hashlib
import os
from pathlib import Path

from blinkpy.config import Config
from blinkpy.model_files import open_file, read_bytes
from blinkpy.models.weights.safetensors_files import weight_files
from blinkpy.queues.words import digest_of_bytes

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, evenly spread: other weights differ nearly everywhere


def model_digest(config: Config, folder: Path, reads_weights: bool) -> int:
    """Of the model's config, of samples of its weights, and of the options that change its numbers. reads_weights: whether the
    device does."""
    options = config.model.quantization, config.model.load_format, config.cache.kv_cache_dtype, config.cache.window_cache
    dummy = config.model.seed if config.model.load_format == "dummy" else None
    digest = hashlib.sha256(repr((options, config.model.dtype, dummy, reads_weights)).encode())
    digest.update(read_bytes(folder, "config.json"))
    if reads_weights and dummy is None:
        for path in weight_files(folder):
            with open_file(folder, path.name) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode())
                for sample in range(SAMPLES):
                    file.seek(sample * size // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest_of_bytes(digest.digest())
