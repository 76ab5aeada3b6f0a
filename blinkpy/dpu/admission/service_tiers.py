"""The classes of requests by the names that OpenAI has for them."""

PRIORITY, FLEX = "priority", "flex"
TIERS = {PRIORITY: 0, FLEX: 1}
"""RequestParameters.best_effort of each: latency-sensitive, and best effort."""
DEFAULT = "default"
KEYS_TIER = ("auto", DEFAULT)
"""What asks for that of the key."""


def shown_tier(asked: str | None, served: str) -> str:
    """What an answer names, for a request that asked for a tier, or for none. Clients count tokens of `priority` apart, as OpenAI
    takes more for them: only who asked for it shall see it."""
    return DEFAULT if served == PRIORITY != asked else served
