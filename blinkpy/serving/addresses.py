"""Where a server listens: checked before minutes go into loading a model, and shown to people when it is ready."""

import json
import shlex
import socket

from blinkpy.config import Config, ConfigError


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
    """Print the address of a server that is ready, with a request to paste. seconds: that its start took."""
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
