"""The engine: provisioned by the host, driven by it or by the loop on the GPU; and its door for front ends on other machines."""
