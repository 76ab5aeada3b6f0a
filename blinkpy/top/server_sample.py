"""One sample of a server's /metrics, and values derived from two samples."""

import re
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

LINE = re.compile(r"(blinkpy_\w+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')
TIMEOUT_S = 3.0
MOST_BYTES = 4 << 20  # of an answer


@dataclass
class ServerSample:
    """One sample of a server's metrics.

    values: sums over all labels, by name without "blinkpy_".
    buckets: count up to each bound of a histogram.
    state: the engine's, or "".
    problem: why the sample is empty, or "".
    at: time of the monotonic clock, s.
    tenants: values of each tenant, by name without "tenant_".
    """

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    state: str = ""
    problem: str = ""
    tenants: dict[str, "ServerSample"] = field(default_factory=dict)

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def rate(self, before: "ServerSample | None", name: str) -> float | None:
        """Increase of a counter per second since an earlier sample; None without `before`. After a restart of
        the server, the counter counts from 0.
        """
        if before is None or before.problem or self.at <= before.at:
            return None
        change = self.get(name) - before.get(name)
        return (change if change >= 0 else self.get(name)) / (self.at - before.at)

    def quantile(self, before: "ServerSample | None", name: str, share: float) -> float | None:
        """A quantile of a histogram since an earlier sample, or since the start. None without observations.
        Linear within a bucket.
        """
        earlier = {} if before is None else before.buckets.get(name, {})
        rows = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(self.buckets.get(name, {}).items())]
        if not rows or min(count for _, count in rows) < 0:  # a worker was restarted
            rows = sorted(self.buckets.get(name, {}).items())
        if not rows or rows[-1][1] <= 0:
            return None
        wanted, low, under = share * rows[-1][1], 0.0, 0.0
        for bound, count in rows:
            if count >= wanted:
                inside = (wanted - under) / (count - under) if count > under else 0.0
                return low if bound == float("inf") else low + (bound - low) * inside
            low, under = bound, count
        return low


def parse_metrics(text: str, at: float) -> ServerSample:
    """The sample of an exposition. Skips unknown lines."""
    sample = ServerSample(at)
    for line in text.splitlines():
        found = LINE.fullmatch(line)
        if found is None:
            continue
        name, labels, value = found[1].removeprefix("blinkpy_"), dict(LABEL.findall(found[2] or "")), float(found[3])
        if "tenant" in labels:
            tenant, name = sample.tenants.setdefault(labels["tenant"], ServerSample(at)), name.removeprefix("tenant_")
            tenant.values[name] = tenant.get(name) + value
        elif "le" in labels:
            table = sample.buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float(labels["le"])
            table[bound] = table.get(bound, 0.0) + value
        elif "state" in labels:
            sample.state = labels["state"] if value else sample.state
        else:
            sample.values[name] = sample.values.get(name, 0.0) + value
            if "status" in labels:
                kind = f"{name}_{labels['status'][0]}xx"
                sample.values[kind] = sample.values.get(kind, 0.0) + value
    if "engine_up" not in sample.values:
        sample.problem = "no metrics of blinkpy at this URL"
    return sample


def look(url: str, insecure: bool) -> ServerSample:
    """Fetch a sample from a server. An error is stored as its problem."""
    context = ssl.create_default_context() if url.startswith("https:") else None
    if context is not None and insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S, context=context) as answer:
            return parse_metrics(answer.read(MOST_BYTES).decode("utf-8", "replace"), time.monotonic())
    except urllib.error.HTTPError as error:
        error.close()
        return ServerSample(time.monotonic(), problem=f"status {error.code}")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        return ServerSample(time.monotonic(), problem=f"gone: {text}".splitlines()[0])
