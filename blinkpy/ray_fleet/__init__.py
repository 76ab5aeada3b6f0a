"""Engines and front ends in a Ray cluster: placed, watched, started again, and scaled. No token passes through Ray."""
