"""The engine's end of a link."""
