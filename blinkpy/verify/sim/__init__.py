"""A deterministic simulator around the scheduler: front ends, transport, model and clock in one thread, from one seed.

The scheduler that serves is the function that runs here. `run` simulates many seeds; `python -m blinkpy.verify.sim` does so from
the command line. What is checked, and what is not: docs/verification.md.
"""

from blinkpy.verify.sim.runs import RunReport, run

__all__ = ["RunReport", "run"]
