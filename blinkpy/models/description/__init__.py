"""What a model computes, as data."""
