"""What a config.json says: its values, rotary embeddings and blocks, as most families spell them."""
