"""Attacks that were found once, by people or by chance: each with its server."""

from attack.site import SiteKind
from benchmarks.serving.attack_grammar import (
    CHUNKED,
    DRIPPED,
    IMMEDIATELY,
    MIDWAY,
    NEIGHBOUR,
    NEVER,
    PIPELINED,
    RESET,
    SLOWLY,
    STALLED,
    STRANGER,
    TENANT,
    Attack,
)

KEYS, NO_KEYS = SiteKind(tls=False, tenants=True), SiteKind(tls=False, tenants=False)
TLS = SiteKind(tls=True, tenants=True)


def _burst(work: str, connections: int, **more: object) -> tuple[Attack, ...]:
    return (Attack(work, STRANGER, connections, rounds=1, **more),)  # type: ignore[arg-type]


KNOWN: dict[str, tuple[SiteKind, tuple[Attack, ...]]] = {
    "silent TLS connections": (TLS, _burst("accept", 1100)),
    "half handshakes": (TLS, (Attack("handshake", STRANGER, 1100, pace=STALLED),)),
    "handshakes": (TLS, (Attack("handshake", STRANGER, 200, leaves=IMMEDIATELY),)),
    "64 times /metrics": (KEYS, _burst("GET /metrics", 64)),
    "800 times /metrics": (KEYS, _burst("GET /metrics", 800)),
    "3,000 times /metrics": (KEYS, _burst("GET /metrics", 3000, addresses=1000)),
    "3,000 times /health": (KEYS, _burst("GET /health", 3000, addresses=1000)),
    "3,000 unknown paths": (KEYS, _burst("unknown path", 3000, addresses=1000)),
    "3,000 wrong keys": (KEYS, _burst("wrong key", 3000, addresses=1000)),
    "3,000 malformed heads": (KEYS, _burst("invalid", 3000, addresses=1000)),
    "/metrics, repeated": (KEYS, (Attack("GET /metrics", STRANGER, 64),)),
    "the page, repeated": (KEYS, (Attack("GET /docs", STRANGER, 64),)),
    "pipelined /health": (KEYS, (Attack("GET /health", STRANGER, 64, pace=PIPELINED),)),
    "unread /openapi.json": (KEYS, (Attack("GET /openapi.json", STRANGER, 60, pace=PIPELINED, reading=NEVER),)),
    "70 streams with biases": (KEYS, (Attack("streams with biases", TENANT, 70, prepared=128),)),
    "70 streams with biases of the same tenant": (KEYS, (Attack("streams with biases", NEIGHBOUR, 70, prepared=128),)),
    "70 streams with grammars": (KEYS, (Attack("streams with grammars", TENANT, 70, prepared=128),)),
    "all slots at one moment": (KEYS, (Attack("all slots", TENANT, 2, 128),)),
    "all slots of one tenant, and streams of another": (
        KEYS,
        (Attack("all slots", NEIGHBOUR, 1, 128), Attack("stream", TENANT, 64)),
    ),
    "slow expressions whose clients leave": (KEYS, (Attack("regular expression", TENANT, 64, leaves=IMMEDIATELY, prepared=64),)),
    "slow expressions": (KEYS, (Attack("regular expression", TENANT, 64, prepared=64),)),
    "schemas": (KEYS, (Attack("schema", TENANT, 65, prepared=128),)),
    "small bodies: fields": (KEYS, (Attack("unknown fields", TENANT, 32, 200),)),
    "small bodies: nesting": (KEYS, (Attack("nesting", TENANT, 32, 100),)),
    "small bodies: messages": (KEYS, (Attack("messages", TENANT, 32, 50),)),
    "small bodies: parts": (KEYS, (Attack("content parts", TENANT, 32, 60),)),
    "small bodies: tools": (KEYS, (Attack("tools", TENANT, 32, 20),)),
    "small bodies: biases": (KEYS, (Attack("biases", TENANT, 32, 200),)),
    "small bodies: banned words": (KEYS, (Attack("banned words", TENANT, 32, 8),)),
    "small bodies: stop strings": (KEYS, (Attack("stop strings", TENANT, 32),)),
    "small bodies: escapes": (KEYS, (Attack("escapes", TENANT, 32, 80),)),
    "small bodies: choices": (KEYS, (Attack("choices", TENANT, 32, 100),)),
    "small bodies: empty objects": (KEYS, (Attack("fields of /v1/responses/input_tokens", TENANT, 32, prepared=400),)),
    "small bodies: any field of a chat": (KEYS, (Attack("fields of /v1/chat/completions", TENANT, 32, prepared=400),)),
    "small bodies: any field to tokenize": (KEYS, (Attack("fields of /tokenize", TENANT, 32, prepared=400),)),
    "70 streams with biases without keys": (NO_KEYS, (Attack("streams with biases", NEIGHBOUR, 70, prepared=128),)),
    "large bodies": (KEYS, (Attack("huge request", TENANT, 16, 10),)),
    "prompt scores": (KEYS, (Attack("prompt scores", TENANT, 2, 16),)),
    "log probabilities": (KEYS, (Attack("log probabilities", TENANT, 2, 12),)),
    "slow readers": (KEYS, (Attack("stream", TENANT, 200, reading=SLOWLY),)),
    "readers that never read": (KEYS, (Attack("stream", TENANT, 200, reading=NEVER),)),
    "pipelined requests": (KEYS, (Attack("short request", TENANT, 32, pace=PIPELINED),)),
    "small chunks": (KEYS, (Attack("large request", TENANT, 50, pace=CHUNKED),)),
    "stalled bodies": (KEYS, (Attack("huge request", TENANT, 250, 30, pace=STALLED),)),
    "dripped bodies": (KEYS, (Attack("short request", TENANT, 1000, pace=DRIPPED),)),
    "dripped heads": (KEYS, (Attack("head", STRANGER, 1000, pace=DRIPPED),)),
    "a flood of requests": (KEYS, (Attack("short request", TENANT, 300),)),
    "requests that are reset": (KEYS, (Attack("stream", TENANT, 200, leaves=RESET),)),
    "streams that end midway": (KEYS, (Attack("log probabilities", TENANT, 8, 12, leaves=MIDWAY),)),
    "all of it without keys": (NO_KEYS, (Attack("GET /metrics", STRANGER, 64), Attack("unknown fields", NEIGHBOUR, 32, 200))),
}
