"""Readers of config.json: values, rotary embeddings and blocks, in the spelling of most families."""
