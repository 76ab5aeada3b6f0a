"""Which kernels are compiled, of all that launches ask for, where not all of them are.

A *choice* leads to other code: a flag, a list of types, a tile with its warps and stages, a number of splits. Sizes of a model's
layers do so seldom. Chosen are kernels that have, taken together, each flag, and a share of all other choices and of the pairs of
a kernel's flags; then a share of the others, which differ from those in sizes and in how choices meet. A seed draws the shares:
runs after each other see all.
"""

import random
from itertools import combinations
from typing import Any, NamedTuple

# Constants that a model gives to any kernel: whether one is 0 is a choice, and nothing else of it. Others are choices.
SIZES = frozenset(
    (
        *("N", "K", "E", "H", "KVH", "D", "HIDDEN", "WIDTH", "OUT_STRIDE", "ROTARY", "WINDOW"),
        *("ALPHA", "FACTOR", "LIMIT", "SOFTCAP", "GROWTH", "PERIOD"),
    )
)
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "VECTOR")  # one choice together: what files of configurations have
DRAWN = 6  # of choices that are no flags, and of pairs of flags, one in six is in a sample
SHARE = 24  # of what brings no new choice, one in twenty-four is compiled, too

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
        if constant[0] in SIZES or isinstance(value, bool)
    ]
    values = [(constant, str(value)) for constant, value in constants.items() if constant[0] not in SIZES]
    together = [("types", *types.values()), ("tile", *options, *tile), *combinations(flags, 2)]
    always, others = (frozenset((name, *fact) for fact in facts) for facts in (((), *flags), (*values, *together)))
    return AskedFor(f"{name} {info['key']}", always, others)


def choose(asked: dict[str, AskedFor], seed: int) -> set[str]:
    """The keys of those to compile. Who brings most new choices is next, in a random order where several bring as many."""
    order = sorted(asked)
    draw = random.Random(seed)
    draw.shuffle(order)
    every = sorted(frozenset[Fact]().union(*(kernel.others for kernel in asked.values())), key=repr)
    drawn = frozenset(draw.sample(every, -(-len(every) // DRAWN)))
    new, chosen = {key: set(asked[key].facts | asked[key].others & drawn) for key in order}, set[str]()
    while order and new[best := max(order, key=lambda key: len(new[key]))]:
        chosen.add(best)
        covered = set(new[best])
        for facts in new.values():
            facts -= covered
    rest = [key for key in order if key not in chosen]
    return chosen | set(rest[: -(-len(rest) // SHARE)])
