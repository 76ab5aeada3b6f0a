"""Matrix products: one entry point, several variants."""
