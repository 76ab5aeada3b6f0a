"""The step on the GPU."""
