"""The decoder that needs NumPy and Numba alone: the CPU's, in float32."""
