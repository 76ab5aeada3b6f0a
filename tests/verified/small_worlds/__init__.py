"""Worlds so small that tests try all sequences of events in them."""
