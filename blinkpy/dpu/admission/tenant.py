"""The owner of an API key, and its limits and rights."""

import hmac
from dataclasses import dataclass

from blinkpy.queues.request_parameters import INT32_RANGE, INT64_MAX

# The classes of requests, by OpenAI's names.

PRIORITY, FLEX = "priority", "flex"
TIERS = {PRIORITY: 0, FLEX: 1}
"""RequestParameters.best_effort of each: latency-sensitive, and best effort."""
DEFAULT = "default"
KEYS_TIER = ("auto", DEFAULT)
"""Names of a tier that leave the choice to the key."""


def shown_tier(asked: str | None, served: str) -> str:
    """The service tier that an answer names.

    Clients count tokens of `priority` separately, since OpenAI charges more for them: only a client that requested it
    sees it.
    """
    return DEFAULT if served == PRIORITY != asked else served


Range = tuple[int, int]  # inclusive


@dataclass(frozen=True)
class Tenant:
    """The owner of one or several keys. None: no limit.

    number: in submission entries, for policies; 0: no tenant.
    weight: share of the service, relative to other waiting tenants.
    requests: limit of choices in flight.
    waiting_tokens: limit of prompt tokens and max_tokens of waiting requests; 0: requests may not wait.
    tokens_per_minute: limit of prompt tokens and generated tokens.
    priorities: permitted range; None: only 0.
    by_priority: whether priorities also order the tenant's waiting requests.
    service_tier: default tier.
    service_tiers: permitted tiers.
    salt: secret of the tenant's part of the prefix cache; empty: the shared part.
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
        """The priority of a request; None: the requested priority is not allowed.

        Requests without the field have priority 0, so 0 becomes the nearest allowed value.
        """
        if self.priorities is None:
            return None if asked else 0
        low, high = self.priorities
        if low <= asked <= high:
            return asked
        return None if asked else min(high, max(low, 0))

    def settle_tier(self, asked: str | None) -> str | None:
        """The service tier of a request; None: the requested tier is not allowed."""
        if asked is None or asked in KEYS_TIER:
            return self.service_tier
        return asked if asked in self.service_tiers else None

    def cache_salt(self, own: int) -> int:
        """The cache salt of its requests, in [0, 2**63). own: their `cache_salt`, or 0."""
        if not self.salt:
            return own
        digest = hmac.digest(self.salt, own.to_bytes(8, "little"), "sha256")
        return max(1, int.from_bytes(digest[:8], "little") & INT64_MAX)


ANONYMOUS = Tenant()
"""The tenant of requests to a server without keys."""
