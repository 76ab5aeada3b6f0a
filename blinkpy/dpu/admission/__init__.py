"""The order of service: API keys and their limits, and the queue of requests that wait for a slot."""
