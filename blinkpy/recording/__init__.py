"""The flight recorder's other half: where an engine keeps what blinkpy.scheduler.phases.recorder writes, and copies of its state;
how other processes read that; and dumps of it."""
