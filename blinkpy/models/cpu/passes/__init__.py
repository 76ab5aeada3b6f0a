"""Loops of the CPU decoders, compiled by Numba."""
