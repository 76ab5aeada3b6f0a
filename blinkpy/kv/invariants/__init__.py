"""Each invariant of the state, once, as device code that returns a fault code."""
