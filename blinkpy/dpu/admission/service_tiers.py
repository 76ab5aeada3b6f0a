"""The classes of requests by the names that OpenAI has for them."""

PRIORITY, FLEX = "priority", "flex"
TIERS = {PRIORITY: 0, FLEX: 1}
"""RequestParameters.best_effort of each: latency-sensitive, and best effort."""
KEYS_TIER = ("auto", "default")
"""What asks for that of the key."""
