"""A deterministic simulator around the scheduler: one seed determines front ends, transport, model and clock, all in one thread.

It runs the same scheduler function that serves. `python -m blinkpy.verify.sim` simulates many seeds.
docs/verification.md lists the checks and their limits.
"""
