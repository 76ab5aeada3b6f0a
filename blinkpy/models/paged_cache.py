"""The paged KV cache's memory: for each layer one tensor of keys and one of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blinkpy.models.description.decoder_description import DecoderDescription

if TYPE_CHECKING:
    import torch


def kv_bytes_per_page(model: DecoderDescription, page_size: int, itemsize: int) -> int:
    """Bytes that one page takes, keys and values of all layers together. itemsize: of a number."""
    return model.kv_elements * page_size * itemsize


class PagedCache:
    """keys, values: per layer a tensor [num_pages, kv_heads, page_size, head_dim], so a page of one head is contiguous."""

    def __init__(
        self, model: DecoderDescription, num_pages: int, page_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ):
        import torch

        shape = (num_pages, model.kv_heads, page_size, model.head_dim)
        self.num_pages, self.page_size = num_pages, page_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in model.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in model.layers]


class ArrayCache:
    """The same as NumPy arrays, float32."""

    def __init__(self, model: DecoderDescription, num_pages: int, page_size: int):
        shape = (num_pages, model.kv_heads, page_size, model.head_dim)
        self.num_pages, self.page_size = num_pages, page_size
        self.keys = [np.zeros(shape, np.float32) for _ in model.layers]
        self.values = [np.zeros(shape, np.float32) for _ in model.layers]
