"""The devices that an engine runs on: null, cpu, cuda."""
