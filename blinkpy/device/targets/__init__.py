"""What each target makes of the portable language's primitives."""
