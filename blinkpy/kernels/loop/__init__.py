"""The kernels of the loop on the GPU."""
