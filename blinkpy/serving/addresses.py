"""The addresses and files of front ends: checked before a model is loaded for minutes, and printed when the
server is ready.
"""

import contextlib
import json
import shlex
import socket
import ssl
from pathlib import Path

from blinkpy.config import AccessOptions, Config, ConfigError
from blinkpy.dpu.admission.keys_file import keys_of
from blinkpy.dpu.descriptors import check_unix
from blinkpy.dpu.handover import check_handover
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.packages import require_packages


def check_access(config: Config, inherited: bool = False) -> None:
    """Check addresses, certificates, chat template, keys and packages before the model is loaded. inherited:
    the sockets exist already. Raises ConfigError.
    """
    keys_of(config).read()
    if config.model.chat_template:
        load_template(Path(), {}, config.model.chat_template, max_characters=1)
    if not inherited:
        if config.access.uds:
            check_unix(config.access.uds)
        else:
            check_address(config.frontend.host, config.frontend.port)
        check_handover(config)
    check_certificates(config.access)
    if config.watch.otlp_traces_endpoint:
        require_packages("otlp_traces_endpoint", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", extra="otel")


def check_certificates(access: AccessOptions) -> None:
    """Raise ConfigError for unusable certificates. A key with a passphrase is unusable, because no user can
    type it.
    """
    if not access.ssl_certfile:
        return
    context, used = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"ssl_certfile {access.ssl_certfile} with its key"
    try:
        context.load_cert_chain(access.ssl_certfile, access.ssl_keyfile or None, password=lambda: "")
        if access.ssl_ca_certs:
            used = f"ssl_ca_certs {access.ssl_ca_certs}"
            context.load_verify_locations(access.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{used} can't be used: {getattr(error, 'strerror', None) or error}") from error


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen on the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}") from error


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """The URL of a server that listens on a host, from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def print_ready(config: Config, port: int, seconds: float | None = None) -> None:
    """Print the address of a ready server, with a request to paste. seconds: duration of its start."""
    name, access = config.model.served_model_name, config.access
    scheme = "https" if access.ssl_certfile else "http"
    url = f"{scheme}://localhost" if access.uds else base_url(config.frontend.host, port, scheme)
    where = f"the Unix socket {access.uds}" if access.uds else url
    way = f" --unix-socket {shlex.quote(access.uds)}" if access.uds else ""
    way += " --insecure" if access.ssl_certfile else ""  # the certificate seldom contains this machine's address
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64, "stream": True}
    )
    key = " -H 'Authorization: Bearer YOUR-KEY'" if any(keys_of(config)[:2]) else ""
    after = "" if seconds is None else f"ready after {seconds:.1f} s; "
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe: the server serves nevertheless
        print(
            f"blinkpy serves {name} on {where} ({after}Ctrl-C ends it). Try:\n\n"
            f"curl -N{way} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n",
            flush=True,
        )
