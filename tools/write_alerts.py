"""Writes the table of alerts in docs/operate.md again, from the annotations in deploy/prometheus-alerts.yaml."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operate.md"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yaml"
MARK = re.compile(r"(<!-- alerts, by make docs -->\n)(\|.*\n)*")


def table() -> str:
    """A Markdown table: alert, first check, and next steps."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rows = [
        (f"`{rule['alert']}`", rule["annotations"].get("check", ""), rule["annotations"]["remedy"]) for rule in group["rules"]
    ]
    lines = [f"| {' | '.join(row)} |\n" for row in [("alert", "check first", "then"), ("---", "---", "---"), *rows]]
    return re.sub(r"([\w-]+ )?\(docs/([\w-]+\.md)(#[\w-]+)?\)", _link, "".join(lines))


def _link(found: re.Match[str]) -> str:
    text = (found[1] or found[2]).strip()
    page = "" if found[2] == PAGE.name else found[2]
    return f"[{text}]({page}{found[3] or ''})"


def written(page: str) -> str:
    """The page with a new table. Raises ValueError if it does not have the mark once."""
    page, found = MARK.subn(lambda match: match[1] + table(), page)
    if found != 1:
        raise ValueError(f"{PAGE} must have the mark {MARK.pattern!r} once")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
