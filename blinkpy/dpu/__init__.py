"""The front end: HTTP, tokenization and queue pairs. It runs on a DPU or on the host, and needs neither torch nor
numba."""
