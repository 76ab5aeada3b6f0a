"""One phase of a turn in each file."""
