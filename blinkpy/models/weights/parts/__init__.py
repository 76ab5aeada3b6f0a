"""The weights of a decoder as parts: each with the tensors of a checkpoint that it consists of."""
