"""The options of admission."""

from dataclasses import dataclass

from blinkpy.config import extends, option


@extends("access")
@dataclass(frozen=True)
class AdmissionOptions:
    """Which keys there are, and how long requests wait for a slot."""

    api_keys: str = option("", "TOML file with keys and their limits, read again at SIGHUP (docs/operate.md)")
    share_prefixes: bool = option(False, "keys share the prefix cache, where the file says nothing else")
    max_waiting_tokens: int = option(
        1 << 22,
        "prompt tokens and max_tokens of a worker's requests that wait for a slot; more get 429 (0: none waits)",
        low=0,
        high=1 << 40,
    )
    max_flex_requests: int = option(
        0, "choices of service tier flex in flight in a worker; others wait (0: as many as slots)", low=0, high=1 << 20
    )
    max_flex_waiting_tokens: int = option(0, "as max_waiting_tokens, of flex alone (0: no limit of its own)", low=0, high=1 << 40)
    max_waiting_s: int = option(60, "seconds a request waits for a slot before it gets 429", low=1, high=3600)
