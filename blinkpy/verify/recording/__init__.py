"""The flight recorder's other half: copies of the state, dumps, and replaying them on any machine.

`blinkpy.scheduler.phases.recorder` writes down every call of the scheduler, `memory` keeps that, and now and then a copy of the
state, where other processes can read it, as `reader` does. `file` is what a dump looks like, `replay` runs it again, `trace` and
`timeline` tell what happened.
"""
