"""The recording of an engine: memory for the records of blinkpy.scheduler.phases.recorder and for snapshots of
the state, a reader for other processes, and dump files.
"""
