"""The attacked server: one worker, the null engine at 20 ms a step, 1,024 descriptors per process, HTTP or TLS, two tenants or no
keys."""

import contextlib
import http.client
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import Command

from benchmarks.serving.attack_clients import Goal
from benchmarks.serving.process_memory import Memory, worker_below

ADDRESS = re.compile(r"blinkpy serves \S+ on (https?)://127\.0\.0\.1:(\d+)")
BOUND = re.compile(r"worker.* at most ([\d,.]+) MiB")  # of its memory, as the server prints it
LOSSES = re.compile(r"^blinkpy_engine_losses_total(?:\{[^}]*\})? (\d+)", re.MULTILINE)
LOAD = re.compile(r'"server_load": ?(\d+)')
ANSWER_S, REST_S = 30.0, 60.0
DESCRIPTORS, STEP_US, SLOTS = 1024, 20_000, 256
KEYS = '[victim]\nkey = "victim"\n[tenant]\nkey = "tenant"\n'
OPTIONS = (
    *("--device", "null", "--null-step-us", str(STEP_US), "--workers", "1", "--slots", str(SLOTS), "--port", "0"),
    *("--load-format", "dummy", "--no-access-log"),
)


@dataclass(frozen=True)
class SiteKind:
    """The options of a server."""

    tls: bool
    tenants: bool

    def __str__(self) -> str:
        return f"{'TLS' if self.tls else 'HTTP'}, {'two tenants' if self.tenants else 'no keys'}"


SITE_KINDS = [SiteKind(tls, tenants) for tls in (False, True) for tenants in (True, False)]


class Site:
    """A running server. worker: process id of its worker; most_mib: the bound of its memory."""

    def __init__(self, kind: SiteKind, command: Command, goal: Goal):
        self.kind, self.goal, self.command = kind, goal, command
        self.worker = worker_below(command.process.pid)
        self.most_mib = float(command.find(BOUND)[1].replace(",", ""))

    def memory(self) -> Memory:
        return Memory(self.worker)

    def get(self, path: str) -> str:
        """The body of an answer. Raises OSError after ANSWER_S."""
        return self._ask("GET", path)[1]

    def serves(self) -> bool:
        """Whether a request of the victim's tenant gets its token now. Raises OSError after ANSWER_S."""
        headers = {"Content-Type": "application/json"}
        if self.goal.neighbour_key:
            headers["Authorization"] = f"Bearer {self.goal.neighbour_key}"
        return self._ask("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 1}', headers)[0] == 200

    def _ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and body of an answer. Raises OSError after ANSWER_S."""
        context = self.goal.context()
        where, timeout = ("127.0.0.1", self.goal.port), ANSWER_S
        if context:
            context.check_hostname = False
            connection: Any = http.client.HTTPSConnection(*where, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(*where, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, str(answer.read().decode())

    def losses(self) -> int:
        """The number of times that the worker lost the engine or its lease."""
        return sum(int(number) for number in LOSSES.findall(self.get("/metrics")))

    def alive(self) -> bool:
        """Whether its worker is still the first one."""
        with contextlib.suppress(StopIteration):
            return worker_below(self.command.process.pid) == self.worker
        return False

    def rest(self) -> bool:
        """Wait until no request runs and new requests are served; False after REST_S."""
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = LOAD.search(self.get("/load"))
                if found and found[1] == "0" and self.serves():
                    return True
            time.sleep(0.2)
        return False


@contextlib.contextmanager
def site_of(kind: SiteKind, certificate: tuple[Path, Path]) -> Iterator[Site]:
    """Start a server and end it."""
    with tempfile.TemporaryDirectory() as folder:
        options = list(OPTIONS)
        if kind.tenants:
            keys = Path(folder) / "keys.toml"
            keys.write_text(KEYS)
            keys.chmod(0o600)
            options += ["--api-keys", str(keys)]
        if kind.tls:
            options += ["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])]
        command = Command("serve", "demo", *options, descriptors=DESCRIPTORS)
        try:
            port = int(command.find(ADDRESS)[2])
            keys_of = ("tenant", "victim") if kind.tenants else ("", "")
            yield Site(kind, command, Goal(port, str(certificate[0]) if kind.tls else "", *keys_of))
        finally:
            command.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for loopback, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
