"""Products with quantised weights by torch."""
