"""Worlds so small that everything that can happen in them is tried."""
