"""Parts of Anthropic's requests."""
