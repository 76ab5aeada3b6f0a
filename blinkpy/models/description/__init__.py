"""Descriptions of models, as data."""
