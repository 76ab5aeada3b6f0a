"""The interface of front ends and the engine: the layout of the queues, and the hashes that name pages. Only
NumPy is imported.
"""
