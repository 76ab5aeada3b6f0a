"""A deterministic simulator around the scheduler: front ends, transport, model and clock in one thread, from one seed.

The scheduler that serves is the function that runs here. `python -m blinkpy.verify.sim` simulates many seeds. What is checked,
and what is not: docs/verification.md.
"""
