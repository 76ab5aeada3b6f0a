"""The options of admission."""

from dataclasses import dataclass

from blinkpy.config import extends, option


@extends("access")
@dataclass(frozen=True)
class AdmissionOptions:
    """API keys, and limits for requests that wait for a slot."""

    api_keys: str = option("", "TOML file with API keys and their limits, read again on SIGHUP (docs/operate.md)")
    share_prefixes: bool = option(False, "let all keys share the prefix cache, unless the file of --api-keys says otherwise")
    max_waiting_tokens: int = option(
        1 << 22,
        "maximum tokens (prompt plus max_tokens) of a worker's requests that wait for a slot; beyond it the "
        "request gets a 429 (0: no request may wait)",
        low=0,
        high=1 << 40,
    )
    max_flex_requests: int = option(
        0,
        "maximum choices in flight per worker for requests of service tier flex; further choices wait (0: as many as slots)",
        low=0,
        high=1 << 20,
    )
    max_flex_waiting_tokens: int = option(
        0, "like max_waiting_tokens, for requests of service tier flex (0: no separate limit)", low=0, high=1 << 40
    )
    max_waiting_s: int = option(
        60, "maximum time that a request waits for a slot, in seconds; then it gets a 429", low=1, high=3600
    )
