"""The front end: HTTP, tokenization and queue pairs, on a DPU or on the host, without torch and Numba."""
