"""Where a server listens: checked before minutes go into loading a model, and shown to people when it is ready."""

from __future__ import annotations

import json
import shlex
import socket

from blinkpy.config import Config, ConfigError, split_address


def check_transport(config: Config, given: frozenset[str], address: str) -> None:
    """Raise ConfigError when options of the transport don't fit each other. address: name of the option with HOST:PORT."""
    if config.transport.transport == "shm":
        for name in ("listen", "engine", "queue_memory", "rdma_device", "rdma_gid_index"):
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')} needs --transport rdma")
        return
    text = getattr(config.transport, address)
    if not text:
        raise ConfigError(f"--transport rdma needs --{address} HOST:PORT")
    split_address(text, address)
    if address == "engine" and "name" in given:
        raise ConfigError("--name is for front ends on the engine's machine; --transport rdma finds the engine by --engine")


def check_address(host: str, port: int) -> None:
    """Notice an address that can't be used before minutes go into loading a model. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}") from error


def base_url(host: str, port: int) -> str:
    """Where to reach a server that listens on a host, from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_ready(config: Config, port: int, seconds: float | None = None) -> None:
    """Print that the server is ready, with a request to paste."""
    name, url = config.model.served_model_name, base_url(config.frontend.host, port)
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64, "stream": True}
    )
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.frontend.api_key else ""
    after = "" if seconds is None else f"ready after {seconds:.1f} s; "
    print(
        f"blinkpy serves {name} on {url} ({after}Ctrl-C ends it). Try:\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n",
        flush=True,
    )
