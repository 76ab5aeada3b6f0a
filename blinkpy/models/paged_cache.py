"""The paged KV cache's memory: for each layer one tensor of keys and one of values."""

import torch

from blinkpy.models.description.decoder_description import DecoderDescription


def kv_bytes_per_page(model: DecoderDescription, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes, keys and values of all layers together."""
    return model.kv_elements * page_size * dtype.itemsize


class PagedCache:
    """keys, values: per layer a tensor [num_pages, kv_heads, page_size, head_dim], so a page of one head is contiguous."""

    def __init__(
        self, model: DecoderDescription, num_pages: int, page_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ):
        shape = (num_pages, model.kv_heads, page_size, model.head_dim)
        self.num_pages, self.page_size = num_pages, page_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in model.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in model.layers]
