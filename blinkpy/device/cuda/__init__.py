"""The CUDA runtime, from the host: graphs, cubins, memory."""
