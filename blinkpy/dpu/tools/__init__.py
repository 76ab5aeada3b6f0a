"""Tool calls and reasoning: splits a model's text into the parts of a message. Each call format has one file."""
