"""Recurrent blocks of a decoder: gated delta nets, short convolutions and state spaces, with their sizes in elements.

A block keeps a state per request instead of keys and values. It replaces a layer's attention; a state space may also run
parallel to it.
"""

from typing import NamedTuple


class GatedDelta(NamedTuple):
    """A gated delta net (Yang et al., "Gated Delta Networks", ICLR 2025): a recurrent layer instead of attention.

    Each request has a state: for each value head a matrix, float32 [key_dim, value_dim], and the last `taps` - 1 inputs of
    each channel of the causal convolution. A token has a decay a, a strength b, a normalised key k and query q, and a value v.
    The matrix S becomes a S + k (b (v - (a S)^T k))^T, and the token's result is S^T q.

    key_heads: number of query heads, and of key heads. Consecutive value heads share a key head.
    value_heads: a multiple of key_heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def key_size(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def in_size(self) -> int:
        """Width of the first projection: the channels, then the gate of the results."""
        return self.channels + self.value_size

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.value_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: value heads, elements of a key, and of a value."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def drafted_size(self) -> int:
        """Numbers of a drafted token that its state keeps for each value head: its key, its value, strength and decay."""
        return self.key_dim + self.value_dim + 2


class ShortConvolution(NamedTuple):
    """A gated short convolution (LFM2 technical report, arXiv 2511.23404, section 2): a recurrent layer instead of attention.

    The layer's first projection gives B, C and x, each [channels]. The result is C * (causal convolution of B * x over `taps`
    tokens, separate for each channel), all by element. A request's state is the last `taps` - 1 products B * x; it has no matrix.

    bias: whether both projections and the convolution have biases.
    """

    channels: int
    taps: int = 3
    bias: bool = False

    @property
    def in_size(self) -> int:
        """Width of the first projection."""
        return 3 * self.channels

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.channels

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: none."""
        return 0, 0, 0

    @property
    def drafted_size(self) -> int:
        """Numbers that a state keeps of a drafted token, in addition to its input of the convolution."""
        return 0


class StateSpace(NamedTuple):
    """A state-space layer (Mamba-2: Dao and Gu, arXiv 2405.21060): a recurrent layer instead of attention.

    Each request has a state: for each head a matrix, float32 [key_dim, value_dim], and the last `taps` - 1 inputs of each
    channel of the causal convolution. A token has for each head a time step d and a value v, and for each group of heads a key k
    and a query q (B and C). With the head's rate a, the matrix S becomes exp(-a d) S + d k v^T, and the token's result is S^T q,
    plus v times the head's skip. The results are gated by silu, then normalised over each group if `normed`.

    groups: of consecutive heads; a divisor of `heads`.
    bias, conv_bias, out_bias: whether the first projection, the convolution and the last projection have biases.
    """

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    normed: bool = True

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys, queries."""
        return self.value_size + 2 * self.groups * self.key_dim

    @property
    def in_size(self) -> int:
        """Width of the first projection: the channels, then the gate of the results, then time steps."""
        return self.channels + self.value_size + self.heads

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.value_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: heads, elements of a key, and of a value."""
        return self.heads, self.key_dim, self.value_dim

    @property
    def drafted_size(self) -> int:
        """Numbers of a drafted token that its state keeps for each head: its key, its value, and its time step."""
        return self.key_dim + self.value_dim + 1


Recurrence = GatedDelta | ShortConvolution | StateSpace


def state_bytes(recurrence: Recurrence, itemsize: int, drafts: int = 0) -> int:
    """Bytes of the state of one request in one layer.

    itemsize: bytes of an input of the convolution.
    drafts: maximum drafts of a request in one step; see blinkpy.models.recurrent_states.
    """
    heads, key_dim, value_dim = recurrence.matrices
    drafted = drafts * (recurrence.channels + heads * recurrence.drafted_size)
    return 4 * heads * key_dim * value_dim + ((recurrence.taps - 1) * recurrence.channels + drafted) * itemsize
