"""Tool calls and reasoning: from a model's text to the parts of a message. One file a call format."""
