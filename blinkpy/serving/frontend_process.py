"""Runs front ends, for `blinkpy frontend` or as a child of `serve`."""

import contextlib
import json
import shlex
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from blinkpy.config import AccessOptions, Config, ConfigError
from blinkpy.dpu.admission.keys_file import keys_of
from blinkpy.dpu.descriptors import check_unix
from blinkpy.dpu.fleet.engine_list import check_engines
from blinkpy.dpu.handover import Inheritance, check_handover, inherit
from blinkpy.dpu.watch.log_output import end_logging, start_logging
from blinkpy.models.weights.model_folder import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Signals, end_within, exit_process
from blinkpy.processes import Reporter
from blinkpy.progress import Progress

# Checks addresses and files of front ends before a model loads for minutes, and prints the address when the
# server is ready.


def check_access(config: Config, inherited: bool = False) -> None:
    """Check addresses, certificates, chat template, keys and packages before the model is loaded. inherited: whether the sockets
    already exist. Raises ConfigError.
    """
    keys_of(config).read()
    if config.model.chat_template:
        # Imported only here: it brings Jinja and the tokenizer, a sixth of the time before `serve` starts its processes.
        from blinkpy.dpu.text.chat_template import load_template

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
    """Raise ConfigError for unusable certificates. A key with a passphrase is unusable, because no user can enter it."""
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
    options = f" --unix-socket {shlex.quote(access.uds)}" if access.uds else ""
    options += " --insecure" if access.ssl_certfile else ""  # certificates rarely contain this machine's address
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64, "stream": True}
    )
    key = " -H 'Authorization: Bearer YOUR-KEY'" if any(keys_of(config)[:2]) else ""
    after = "" if seconds is None else f"ready after {seconds:.1f} s; "
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the server
        print(
            f"blinkpy serves {name} on {where} ({after}Ctrl-C ends it). Try:\n\n"
            f"curl -N{options} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n",
            flush=True,
        )


FRONTEND_START_S = 60.0
FRONTEND_HURRY_S = 3.0  # time for workers to answer their clients after a second signal
SPARE_S = 3.0  # from the last worker's time limit until the kernel kills the front end
PACKAGES = ("httptools", "jinja2", "msgspec", "orjson", "tokenizers", "uvloop")


def frontend_alone(config: Config, given: frozenset[str]) -> int:
    """Run `blinkpy frontend`: front ends that attach to an engine, waiting for it if necessary.

    given: names of the options that the user set.
    """
    require_packages("a front end", *PACKAGES)  # report them once, before any worker starts
    check_engines(config, given)
    inherited = inherit(config)
    check_access(config, inherited is not None)
    config = find_model(config, Progress(), weights=False)
    code = run_front(config, lambda host, port: print_ready(config, port), inherited=inherited)
    exit_process(code)


def frontend_child(config: Config, reporter: Reporter, starts_fd: int = -1) -> int:
    """Run the front ends as a child of `serve`. starts_fd: see EngineStarts, or -1 if this server does not
    start the engine.
    """
    return run_front(config, lambda host, port: reporter.ready(host=host, port=port), quiet=True, starts_fd=starts_fd)


def run_front(
    config: Config,
    on_ready: Callable[[str, int], None],
    quiet: bool = False,
    starts_fd: int = -1,
    inherited: Inheritance | None = None,
) -> int:
    """Run front ends until SIGTERM or SIGINT, in the main thread. The model must be a local folder.

    quiet: whether the parent reports a second signal instead.
    starts_fd: see frontend_child.
    inherited: sockets from the previous front end.
    """
    from blinkpy.dpu.supervisor import Supervisor, longest_end_s

    start_logging("frontend", config.frontend.log_level, config.watch.log_format)
    supervisor = Supervisor(config, Path(config.model.model), on_ready, starts_fd, inherited)

    def stop(count: int) -> None:
        supervisor.stop()
        end_within(longest_end_s(config) + SPARE_S)

    with Signals(stop, quiet, supervisor.hang_up).caught():
        try:
            return supervisor.run()
        finally:
            end_logging()
