"""The primitives of the portable language on each target."""
