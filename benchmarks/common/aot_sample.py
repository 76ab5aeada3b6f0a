"""The selection of kernels to compile, if not all requested kernels are compiled.

A *choice* leads to other code: a flag, a list of types, a tile with its warps and stages, a number of splits. The
sizes of a model's layers rarely do. A sample asks for *facts* and has each of them: each kernel with defaults and with each
table that has entries for it, and a quarter of the flags' values. A seed draws these values, the models whose steps are
examined, and further kernels. Successive runs cover all.
"""

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

import torch

from benchmarks.common.aot_models import MIXED, STEPS, MetaStep, tables
from blinkpy.kernels.config_files import gpus_with_tables

# Constants that a model passes to any kernel: only whether one is 0 is a choice. Other constants are choices.
SIZES = frozenset(
    (
        *("N", "K", "E", "H", "KVH", "D", "HIDDEN", "WIDTH", "OUT_STRIDE", "ROTARY", "WINDOW"),
        *("ALPHA", "FACTOR", "LIMIT", "SOFTCAP", "GROWTH", "PERIOD"),
    )
)
FLAGS = ("SCALES", "SWIGLU")  # numbers that select one of a few algorithms of a kernel
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "VECTOR")  # one choice together: the contents of configuration files
MOST = 60  # kernels of a sample
DRAWN_STEPS = 1  # of STEPS, for each model class in each form
FLAGS_SHARE = 0.25  # of the values of flags that a sample asks for
DRAWN = 8  # the candidate with most new choices is taken

Fact = tuple[Any, ...]


class AskedFor(NamedTuple):
    """A kernel that a launch requests. key: identifies it. facts: its facts in each sample, with its flags. others:
    its other choices, and pairs of flags."""

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
    """Steps of a sample.

    For each model class in each form: DRAWN_STEPS steps of one model, each with one kind of cache. For each kind of recurrence: a
    mixed step in bfloat16, the only one with prompts by blocks. For each kind of form with entries in a table: all steps of one
    form, with that table.
    """
    draw = random.Random(seed)
    groups: dict[tuple[str, str], list[Any]] = {}
    for form in forms:
        groups.setdefault((form.model.name, form.name), []).append(form)
    for group in groups.values():
        form, first = draw.choice(group), draw.randrange(2)
        for i, shape in enumerate(draw.sample(STEPS, DRAWN_STEPS)):
            yield MetaStep(form, shape, "", bool((first + i) % 2) and not form.model.attention.latent)
    recurrent: dict[type, list[Any]] = {}
    for form in forms:
        if form.model.recurrence is not None and form.dtype == torch.bfloat16:
            recurrent.setdefault(type(form.model.recurrence), []).append(form)
    for kind in recurrent.values():
        yield MetaStep(draw.choice(kind), MIXED, "")
    for gpu in gpus_with_tables():
        measured: dict[Any, list[Any]] = {}
        for form in forms:
            if any(known for known, _ in tables(gpu).measured(form.model, form.dtype).values()):
                measured.setdefault((form.name, any(form.model.expert_layers)), []).append(form)
        for group in measured.values():
            form = draw.choice(group)
            for shape, at in product([shape for shape in STEPS if not shape.whole], ("", gpu)):
                yield MetaStep(form, shape, at)


def drawn_facts(asked: dict[str, AskedFor], seed: int) -> dict[str, AskedFor]:
    """The same kernels with the facts that a sample asks for. The values of flags that it does not ask for are among the other
    choices."""
    draw = random.Random(seed)
    flags = sorted({fact for one in asked.values() for fact in one.facts if _of_flag(fact)}, key=repr)
    left = frozenset(fact for fact in flags if draw.random() >= FLAGS_SHARE)
    return {key: one._replace(facts=one.facts - left, others=one.others | (one.facts & left)) for key, one in asked.items()}


def _of_flag(fact: Fact) -> bool:
    """Whether a fact is a kernel's value of a flag: (kernel, (flag, ...), value)."""
    return len(fact) == 3 and isinstance(fact[1], tuple)


def choose(asked: dict[str, AskedFor], seed: int) -> set[str]:
    """The keys of the kernels to compile: together they have each fact. Further ones are drawn, up to MOST in all;
    every second one adds most other choices among a few."""
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
