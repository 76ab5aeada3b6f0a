"""An EAGLE-3 draft head on the CPU, for blinkpy.models.cpu.draft_chain: blinkpy/models/description/draft_heads.py explains it."""

import numpy as np
import torch
from numpy.typing import NDArray

from blinkpy.kv.state import Batch
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import Weights


class DraftHead(TorchDecoder):
    """The head of a model, with its own keys and values in pages of the same numbers.

    tokens: int32 [rows of lm_head], the token of each. The other parameters are those of TorchDecoder.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: Weights,
        tokens: torch.Tensor,
        cache: PagedCache,
        max_model_len: int,
        max_tokens: int,
        progress: TorchProgress | None = None,
    ):
        super().__init__(model, weights, cache, max_model_len, max_tokens, progress)
        self._tokens = tokens

    @torch.inference_mode()
    def fused(self, taken: dict[int, torch.Tensor]) -> torch.Tensor:
        """The head's first inputs, [tokens, hidden]. taken: see TorchDecoder.forward."""
        assert self.model.inputs is not None and self.weights.draft_projection is not None
        states = torch.cat([taken[layer] for layer in self.model.inputs.layers], -1)
        return self.progress.linear(states, self.weights.draft_projection)

    @torch.inference_mode()
    def draft(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        following: NDArray[np.int32],
        hidden: torch.Tensor,
        wanted: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], torch.Tensor]:
        """Run the head over a batch, as TorchDecoder.draft does.

        hidden: [tokens, hidden], result of `fused` for each token, or the previous draft's result.
        Returns, for each wanted token, the most probable token after `following`, int32 [n], and the head's result before its
        last norm, [n, hidden].
        """
        layer, kept = self.weights.layers[0], torch.from_numpy(wanted)
        self.attention.begin(batch, page_table)
        embedded = self._norm(self._embed(torch.from_numpy(following)), layer.input_norm)
        both = torch.cat([embedded, self._norm(hidden, self.weights.draft_hidden_norm)], -1)
        attended = self._attend(0, self.progress.linear(both, layer.qkv, layer.qkv_bias))
        x = self._after_attention(hidden, attended, 0, layer, kept, None)
        rows = self.progress.linear(self._norm(x, self.weights.final_norm), self.weights.lm_head).argmax(-1)
        return self._tokens[rows].numpy(), x
