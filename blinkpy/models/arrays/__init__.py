"""The CPU's decoder in float32, which needs only NumPy and Numba."""
