"""A server under random requests, while parts of it are killed and stopped."""
