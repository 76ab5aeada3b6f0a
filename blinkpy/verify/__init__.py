"""Checks of the scheduler, before and after serving."""
