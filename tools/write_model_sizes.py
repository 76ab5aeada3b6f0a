"""Writes the table of published models in docs/models.md again: their sizes, and how they fit on GPUs, as check-model has it."""

import re
from pathlib import Path

from published_models import MODELS

from blinkpy.config import Config
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.weights.weight_parts import weight_bytes
from blinkpy.serving.model_facts import GPUS, fit, itemsize_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARK = "<!-- sizes, by make docs -->\n"


def rows() -> list[tuple[str, ...]]:
    """A row for each model that is supported; those that are alike in all share one."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in MODELS:
        if one.refusal:
            continue
        model, config = describe_config(one.config), Config()
        itemsize = itemsize_of(model, config)
        fits = [fit(model, config, gpu, size) for gpu, size in GPUS.items()]
        sizes = (
            f"{weight_bytes(model, itemsize) / 2**30:.1f}",
            f"{model.kv_elements * itemsize / 1024:.0f}",
            *("no" if each.problem else f"{each.context:,} ({each.cached:,})" for each in fits),
        )
        found.setdefault(sizes, []).append(f"`{one.hub_id}`")
    return [(", ".join(names), *sizes) for sizes, names in found.items()]


def written(page: str) -> str:
    """The page with its table made anew."""
    head = ("model", "weights, GiB", "KiB a token", *(f"tokens, {gpu}" for gpu in GPUS))
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows())]
    table = "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"
    page, found = re.subn(re.escape(MARK) + r"(\|.*\n)*", lambda _: MARK + table, page)
    if found != 1:
        raise ValueError(f"{PAGE} has {found} places for the table")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
