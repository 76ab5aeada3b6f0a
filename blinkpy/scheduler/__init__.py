"""The turn: from a step's tokens to the next batch."""
