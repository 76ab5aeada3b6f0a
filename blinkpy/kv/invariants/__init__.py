"""The invariants of the state, as device code that returns fault codes."""
