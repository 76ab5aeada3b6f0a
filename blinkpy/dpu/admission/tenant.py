"""Whom a key belongs to, and what it allows."""

import hmac
from dataclasses import dataclass

from blinkpy.queues.request_parameters import INT32_RANGE, INT64_MAX

# The classes of requests by the names that OpenAI has for them.

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


Range = tuple[int, int]  # inclusive


@dataclass(frozen=True)
class Tenant:
    """The owner of a key, or of several. A limit of None does not hold.

    number: in submission entries, for policies; 0: none. weight: its share of the service, against that of others who wait.
    requests: choices in flight; waiting_tokens: prompt tokens and max_tokens of those that wait, 0 where none may;
    tokens_per_minute: prompt tokens and generated ones. priorities: that its requests may have; None: none but 0.
    by_priority: they order its own requests, too, while these wait. service_tier: of requests that name
    none; service_tiers: those that they may name. salt: the secret of its part of the prefix cache; empty: it
    shares the common one.
    """

    name: str = ""
    number: int = 0
    weight: float = 1.0
    requests: int | None = None
    waiting_tokens: int | None = None
    tokens_per_minute: int | None = None
    priorities: Range | None = INT32_RANGE
    by_priority: bool = False
    service_tier: str = PRIORITY
    service_tiers: tuple[str, ...] = tuple(TIERS)
    salt: bytes = b""

    def settle_priority(self, asked: int) -> int | None:
        """The priority of a request that asks for one; None: it is not allowed. 0, which is that of a request without one, too,
        becomes the nearest that is allowed."""
        if self.priorities is None:
            return None if asked else 0
        low, high = self.priorities
        if low <= asked <= high:
            return asked
        return None if asked else min(high, max(low, 0))

    def settle_tier(self, asked: str | None) -> str | None:
        """The service tier of a request that asks for one, or for none; None: it is not allowed."""
        if asked is None or asked in KEYS_TIER:
            return self.service_tier
        return asked if asked in self.service_tiers else None

    def cache_salt(self, own: int) -> int:
        """What its requests with a `cache_salt` (0: without one) have instead of it, in [0, 2**63)."""
        if not self.salt:
            return own
        digest = hmac.digest(self.salt, own.to_bytes(8, "little"), "sha256")
        return max(1, int.from_bytes(digest[:8], "little") & INT64_MAX)


NOBODY = Tenant()
"""Of requests to a server without keys."""
