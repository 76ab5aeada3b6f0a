"""Products of the decoder that works on NumPy arrays, against float64."""

import numpy as np
import pytest

from blinkpy.models.cpu import numpy_products
from blinkpy.models.cpu.numpy_products import ThreadTeam, multiply

SIZES = [(0, 5, 7), (1, 1, 1), (2, 1, 5), (3, 17, 4), (5, 64, 3), (17, 33, 130), (40, 2600, 70), (3, 1500, 900), (1, 1500, 900)]
SIZES += [(130, 40, 50)]
"""Tokens, inputs, outputs: below and beyond a tile, a block of tokens, and what one thread computes."""


@pytest.mark.parametrize(("wide", "invariant"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_products(
    sizes: tuple[int, int, int],
    threads: int,
    wide: bool,
    invariant: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy_products, "has_wide_kernels", lambda: wide)
    monkeypatch.setattr(numpy_products, "UNIT_BYTES", 1 << 10)  # so that small products are divided, too
    monkeypatch.setattr(numpy_products, "UNIT_WORK", 1 << 10)
    tokens, inputs, outputs = sizes
    x = rng.standard_normal((tokens + 2, inputs), np.float32)[1:-1]
    weight = rng.standard_normal((outputs + 2, inputs + 3), np.float32)[1:-1, 1 : inputs + 1]
    around = np.full((tokens + 2, outputs), np.nan, np.float32)
    multiply(ThreadTeam(threads), x, weight, around[1:-1], invariant=invariant)
    assert np.allclose(around[1:-1], x.astype(np.float64) @ weight.T.astype(np.float64), atol=3e-5 * inputs**0.5)
    assert np.isnan(around[[0, -1]]).all()


def test_a_token_of_our_own_products_does_not_depend_on_the_others(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_products, "has_wide_kernels", lambda: False)
    x, weight, team = rng.standard_normal((23, 301), np.float32), rng.standard_normal((77, 301), np.float32), ThreadTeam(2)
    together, apart = np.empty((23, 77), np.float32), np.empty((2, 77), np.float32)
    multiply(team, x, weight, together)
    for first in range(22):
        multiply(team, np.ascontiguousarray(x[first : first + 2]), weight, apart)
        assert (apart == together[first : first + 2]).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(301, 77), (64, 600), (3000, 9)])
def test_an_invariant_product_depends_on_its_token_alone(
    inputs: int, outputs: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: alone, anywhere in a batch, and on any number of threads, between which outputs are divided otherwise."""
    monkeypatch.setattr(numpy_products, "has_wide_kernels", lambda: True)
    monkeypatch.setattr(numpy_products, "UNIT_WORK", 1 << 10)
    x, weight = rng.standard_normal((70, inputs), np.float32), rng.standard_normal((outputs, inputs), np.float32)
    expected = np.empty((70, outputs), np.float32)
    for token in range(70):
        multiply(ThreadTeam(1), x[token : token + 1], weight, expected[token : token + 1], invariant=True)
    for threads in (1, 2, 5):
        some = rng.permutation(70)[: int(rng.integers(2, 71))]
        found = np.empty((len(some), outputs), np.float32)
        multiply(ThreadTeam(threads), x[some], weight, found, invariant=True)
        assert (found == expected[some]).all()


def test_arrays_with_gaps_are_refused(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((4, 8), np.float32), rng.standard_normal((6, 8), np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        multiply(ThreadTeam(1), x[::2], weight, np.empty((2, 6), np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        multiply(ThreadTeam(1), np.ascontiguousarray(x[:, ::2]), weight[:, ::2], np.empty((4, 6), np.float32))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_products_are_compiled_before_the_first_step(wide: bool, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first products that run are the library's: else a step with a few tokens would wait for a compiler."""
    asked: list[bool] = []
    monkeypatch.setattr(numpy_products, "has_wide_kernels", lambda: wide)
    monkeypatch.setattr(numpy_products, "compiled_product", asked.append)
    numpy_products.NumpyProgress(team=ThreadTeam(1), invariant=invariant)
    assert asked == [invariant]
