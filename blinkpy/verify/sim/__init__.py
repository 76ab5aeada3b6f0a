"""A deterministic simulator around the scheduler: front ends, transport, model and clock in one thread, from
one seed.

It runs the same scheduler function that serves. `python -m blinkpy.verify.sim` simulates many seeds.
docs/verification.md lists the checks and their limits.
"""
