"""Writes two tables of docs/models.md again: the model classes, and the sizes of published models as check-model has them."""

import re
from collections.abc import Sequence
from pathlib import Path

from published_models import MODELS

from blinkpy.config import DEFAULT_SLOTS, Config
from blinkpy.models.families.family import describe_config, families
from blinkpy.models.weights.parts.weight_sizes import weight_bytes
from blinkpy.serving.model_facts import GPUS, GpuFit, fit, itemsize_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def rows() -> list[tuple[str, ...]]:
    """A row for each supported model; models with equal values share one."""
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
            *("no" if each.problem else f"{each.context:,} ({each.cached:,}){slots(each)}" for each in fits),
        )
        found.setdefault(sizes, []).append(f"`{one.hub_id}`")
    return [(", ".join(names), *sizes) for sizes, names in found.items()]


def slots(fits: GpuFit) -> str:
    """The slots, if they are fewer than usual."""
    return "" if fits.slots == DEFAULT_SLOTS else f", {fits.slots} slots"


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    rest = ["| " + " | ".join(line) + " |\n" for line in lines]
    return "".join(["| " + " | ".join(head) + " |\n", "|" + "---|" * len(head) + "\n", *rest])


def written(page: str) -> str:
    """The page with new tables. Raises ValueError if a mark is missing."""
    classes = [(f"`{one.name}`", one.models) for one in sorted(families().values(), key=lambda one: one.name)]
    head = ("model", "weights, GiB", "KiB a token", *(f"tokens, {gpu}" for gpu in GPUS))
    for mark, text in (("families", table(("model class", "models"), classes)), ("sizes", table(head, rows()))):
        place = re.compile(rf"(<!-- {mark}, by make docs -->\n)(\|.*\n)*")
        if len(place.findall(page)) != 1:
            raise ValueError(f"{PAGE} must have one line <!-- {mark}, by make docs -->")
        page = place.sub(lambda found, text=text: found[1] + text, page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
