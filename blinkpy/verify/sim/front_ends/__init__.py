"""The simulator's front ends: well-behaved, wild and broken."""
