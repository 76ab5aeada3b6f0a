"""The engine, driven by the host or by the loop on the GPU, and its listener for front ends on other machines."""
