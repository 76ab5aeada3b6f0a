"""The interface between front ends and the engine: layout of the queues, and hashes that name pages. Imports only NumPy."""
