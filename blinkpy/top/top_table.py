"""The tables of `blinkpy top`: a row for each server, and a row for each of their tenants."""

from collections.abc import Callable

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from blinkpy.top.server_sample import ServerSample

NONE = "-"
WIDEST = 1000  # columns
MOST_TENANTS = 20  # maximum number shown, those with most tokens
Cell = Callable[[ServerSample, ServerSample | None], str]


def figure(value: float | None) -> str:
    """A number with three digits, or with all digits before the point."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{figure(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:.3g} s"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else NONE


def _pages(now: ServerSample) -> float:
    return sum(now.get(f"engine_pages_{kind}") for kind in ("held", "cached", "free"))


def _wait(name: str) -> Cell:
    return lambda now, before: " / ".join(duration(now.quantile(before, name, q)) for q in (0.5, 0.99))


def _joules(now: ServerSample, before: ServerSample | None) -> str:
    joules, tokens = now.rate(before, "gpu_energy_joules_total"), now.rate(before, "generated_tokens_total")
    return figure(joules / tokens) if joules and tokens else NONE


# The most important columns are first.
COLUMNS: dict[str, Cell] = {
    "run": lambda now, before: figure(now.get("engine_requests_running")),
    "wait": lambda now, before: figure(now.get("engine_requests_waiting") + now.get("waiting_requests")),
    "tokens/s": lambda now, before: figure(now.rate(before, "generated_tokens_total")),
    "TTFT P50 / P99": _wait("time_to_first_token_seconds"),
    "TPOT P50 / P99": _wait("time_per_output_token_seconds"),
    "KV held": lambda now, before: share(now.get("engine_pages_held"), _pages(now)),
    "slots": lambda now, before: f"{now.get('requests_in_flight'):.0f}/{now.get('slots'):.0f}",
    "hits": lambda now, before: share(now.get("engine_prefix_hit_tokens_total"), now.get("engine_prefix_lookup_tokens_total")),
    "5xx": lambda now, before: figure(now.get("http_responses_total_5xx")),
    "W": lambda now, before: figure(now.values.get("gpu_power_watts")),
    "J/token": _joules,
    "prompt/s": lambda now, before: figure(now.rate(before, "prompt_tokens_total")),
    "steps/s": lambda now, before: figure(now.rate(before, "engine_steps_total")),
    "preempted": lambda now, before: figure(now.get("engine_preemptions_total")),
    "4xx": lambda now, before: figure(now.get("http_responses_total_4xx")),
}


def top_tables(console: Console, now: dict[str, ServerSample], before: dict[str, ServerSample]) -> Group:
    """The tables of servers and tenants.

    now: the last sample of each server, by URL.
    before: an earlier sample of each.
    """
    tenants = tenant_table(now, before)
    return Group(top_table(console, now, before), *([] if tenants is None else ["", tenants]))


def top_table(console: Console, now: dict[str, ServerSample], before: dict[str, ServerSample]) -> Table:
    """The table of servers. Omits the last columns if the console is too narrow."""
    for shown in range(len(COLUMNS), 0, -1):
        table = _table(now, before, list(COLUMNS.items())[:shown])
        if console.measure(table, options=console.options.update(max_width=WIDEST)).maximum <= console.width:
            break
    return table


def _table(now: dict[str, ServerSample], before: dict[str, ServerSample], columns: list[tuple[str, Cell]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("server", no_wrap=True)
    table.add_column("state")
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for url, sample in now.items():
        name = Text(url.removeprefix("http://"))
        if sample.problem:
            table.add_row(name, Text(sample.problem, "red"))
            continue
        state = sample.state or "no engine"
        earlier = before.get(url)
        cells = [cell(sample, None if earlier is sample else earlier) for _, cell in columns]
        table.add_row(name, Text(state, "green" if state == "ready" else "yellow"), *cells)
    return table


def tenant_table(now: dict[str, ServerSample], before: dict[str, ServerSample]) -> Table | None:
    """The tenants of all servers, sorted by tokens and requests; None if no tenant has a name."""
    rows = []
    for url, sample in now.items():
        earlier = before.get(url)
        for name, tenant in sample.tenants.items():
            rate = tenant.rate(None if earlier is None else earlier.tenants.get(name), "tokens_total")
            counts = [tenant.get(column) for column in ("requests_in_flight", "waiting_requests", "requests_refused_total")]
            rows.append(((-(rate or 0.0), -counts[0], -counts[1], url, name), [*map(figure, (*counts[:2], rate, counts[2]))]))
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("server", "tenant", "in flight", "waiting", "tokens/s", "429"):
        table.add_column(title, justify="left" if title in ("server", "tenant") else "right", no_wrap=True)
    for (*_, url, name), cells in sorted(rows)[:MOST_TENANTS]:
        table.add_row(Text(url.removeprefix("http://")), Text(name), *cells)
    if len(rows) > MOST_TENANTS:
        table.caption, table.caption_justify = f"and {len(rows) - MOST_TENANTS} more", "left"
    return table
