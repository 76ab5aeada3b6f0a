"""What front ends and the engine share: the layout of the queues, and the hashes that name pages. NumPy alone."""
