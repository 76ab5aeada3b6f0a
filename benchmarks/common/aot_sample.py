"""Which kernels are compiled, of all that launches ask for, where not all of them are.

A *choice* leads to other code: a flag, a list of types, a tile with its warps and stages, a number of splits. Sizes of a model's
layers do so seldom. A sample has each *fact*: each value of each flag of each kernel, and each kernel with defaults and with each
table that has entries for it. A seed draws the models whose steps are looked at, and further kernels: runs after each other see
all.
"""

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

from benchmarks.common.aot_models import STEPS, MetaStep, tables
from blinkpy.kernels.config_files import gpus_with_tables

# Constants that a model gives to any kernel: whether one is 0 is a choice, and nothing else of it. Others are choices.
SIZES = frozenset(
    (
        *("N", "K", "E", "H", "KVH", "D", "HIDDEN", "WIDTH", "OUT_STRIDE", "ROTARY", "WINDOW"),
        *("ALPHA", "FACTOR", "LIMIT", "SOFTCAP", "GROWTH", "PERIOD"),
    )
)
FLAGS = ("SCALES", "SWIGLU")  # numbers that say which of a few ways a kernel computes
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "VECTOR")  # one choice together: what files of configurations have
MOST = 84  # kernels of a sample
DRAWN = 8  # of which the one with most new choices is taken

Fact = tuple[Any, ...]


class AskedFor(NamedTuple):
    """A kernel that a launch asks for. key: tells it from all others. facts: what each sample has of it, itself and its flags.
    others: its other choices, and pairs of flags."""

    key: str
    facts: frozenset[Fact]
    others: frozenset[Fact] = frozenset()


def asked_for(info: dict[str, Any]) -> AskedFor:
    """info: the arguments of Triton's jit_cache_hook, which is called before a kernel is compiled."""
    name, described = info["fn"].jit_function.__name__, info["compile"]
    types, parameters = described["signature"], [*described["signature"]]
    constants = {(parameters[place[0]], *place[1:]): value for place, value in described["constants"].items()}
    options = [(option, described[option]) for option in ("num_warps", "num_stages", "num_ctas")]
    tile = [(constant, value) for constant, value in constants.items() if constant[0] in TILE]
    flags = [
        (constant, bool(value) if constant[0] in SIZES else value)
        for constant, value in constants.items()
        if constant[0] in SIZES or constant[0] in FLAGS or isinstance(value, bool)
    ]
    values = [(constant, str(value)) for constant, value in constants.items() if constant[0] not in SIZES]
    together = [("types", *types.values()), ("tile", *options, *tile), *combinations(flags, 2)]
    always, others = (frozenset((name, *fact) for fact in facts) for facts in (((), *flags), (*values, *together)))
    return AskedFor(f"{name} {info['key']}", always, others)


def drawn_steps(forms: list[Any], seed: int) -> Iterator[MetaStep]:
    """Steps of a sample: of each model class in each form those of one model, each with one kind of cache; and of one form that a
    table has entries for, of each kind, all steps with that table."""
    draw = random.Random(seed)
    groups: dict[tuple[str, str], list[Any]] = {}
    for form in forms:
        groups.setdefault((form.model.name, form.name), []).append(form)
    for group in groups.values():
        form, first = draw.choice(group), draw.randrange(2)
        for i, shape in enumerate(STEPS):
            yield MetaStep(form, shape, "", bool((first + i) % 2) and not form.model.attention.latent)
    for gpu in gpus_with_tables():
        measured: dict[Any, list[Any]] = {}
        for form in forms:
            if any(known for known, _ in tables(gpu).measured(form.model, form.dtype).values()):
                measured.setdefault((form.name, any(form.model.expert_layers)), []).append(form)
        for group in measured.values():
            form = draw.choice(group)
            for shape, at in product([shape for shape in STEPS if not shape.whole], ("", gpu)):
                yield MetaStep(form, shape, at)


def choose(asked: dict[str, AskedFor], seed: int) -> set[str]:
    """The keys of those to compile: together they have each fact, and further ones are drawn, up to MOST in all, of which every
    second one brings most other choices among a few."""
    order = sorted(asked)
    draw = random.Random(seed)
    draw.shuffle(order)
    new, chosen = {key: set(asked[key].facts) for key in order}, set[str]()
    while order and new[best := max(order, key=lambda key: len(new[key]))]:
        chosen.add(best)
        covered = set(new[best])
        for facts in new.values():
            facts -= covered
    rest = [key for key in order if key not in chosen]
    known = {fact for key in chosen for fact in asked[key].others}
    while rest and len(chosen) < MOST:
        few = rest[:DRAWN] if len(chosen) % 2 else rest[:1]
        best = max(few, key=lambda key: len(asked[key].others - known))
        rest.remove(best)
        chosen.add(best)
        known |= asked[best].others
    return chosen
