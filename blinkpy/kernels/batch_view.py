"""The tensors of a batch that kernels read."""

from typing import Any, NamedTuple, Self

import torch

from blinkpy.kernels.launch import HEADER, AtLeast


class BatchView(NamedTuple):
    """B rows and T tokens of a bucket; an array may be longer. See `blinkpy.kv.state.Batch`, which has them all."""

    counts: torch.Tensor  # int64 [8] batch header
    row_slots: torch.Tensor  # int32 [B] request slot of each row
    query_starts: torch.Tensor  # int32 [B + 1] first token of each row
    context_lengths: torch.Tensor  # int32 [B] tokens in the cache after this step
    emits: torch.Tensor  # int32 [B] 1: the row's last token gives a sampled token
    positions: torch.Tensor  # int32 [T] of each token in its sequence
    cache_slots: torch.Tensor  # int32 [T] page * page size + offset; negative: not written

    @classmethod
    def of(cls, batch: Any) -> Self:
        """The view of a `kv.state.Batch` of tensors."""
        return cls(*(getattr(batch, name) for name in cls._fields))

    def declared(self, size: int, *names: str) -> list[tuple[Any, ...]]:
        """For `check_tensors`: counts, and these arrays for at least `size` rows or tokens."""
        sizes = {name: AtLeast(size + 1 if name == "query_starts" else size) for name in names}
        arrays = [(getattr(self, name), name, (least,), torch.int32) for name, least in sizes.items()]
        return [(self.counts, "counts", *HEADER), *arrays]
