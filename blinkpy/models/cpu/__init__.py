"""The step on the CPU."""
