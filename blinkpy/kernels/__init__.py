"""The largest shapes that the GPU's kernels support. No torch: checks of models work in the base install."""

MAX_HIDDEN = 32_768  # of a norm: one program holds a row in registers
MAX_FP8_WIDTH = 65_536  # of quantised inputs: one program loops over a row
MAX_GROUP = 16  # query heads that share a key and value head
MIN_HEAD_DIM = 16  # the matrix unit multiplies 16 numbers in one instruction
MAX_HEAD_DIM = 512  # queries, keys and sums of a tile fit the registers
MAX_LATENT = 512  # elements of a latent vector: queries, vectors and sums of a tile fit the registers
MAX_ROTATED = 128  # elements after it
MAX_EXPERTS = 1024  # one warp has the logits of a token
MAX_STATE = 1 << 15  # a matrix of a gated delta net, with padded sizes, fits the registers of 8 warps
MAX_TOP_K = 64
ONE_SHOT_BYTES = 512 << 10
"""Largest sum over ranks that is added in one shot: see all_reduce.py."""
