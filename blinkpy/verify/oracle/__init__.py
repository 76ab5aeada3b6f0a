"""The decision oracle: the scheduler's rules over plain Python objects, and the comparison of a turn with them."""
