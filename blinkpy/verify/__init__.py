"""Checks the scheduler, before and after serving."""
