"""Random numbers of the simulator: the same in plain Python and compiled, and independent from event to event.

A linear congruential generator modulo 2**48 (D. E. Knuth, The Art of Computer Programming 2, 3.3.4; the
constants of drand48), whose upper 32 bits are used. Each actor starts it again in each turn, from the run's
seed, the turn and its own number: so an event that is left out of a run changes nothing about the draws of
the others.
"""

from blinkpy.device.portable import device

MULTIPLIER, INCREMENT = 0x5DEECE66D, 0xB
MASK = (1 << 48) - 1
THOUSAND = 1000


@device
def scramble(x):
    """A number of 48 bits that depends on all bits of another one."""
    x = (x * MULTIPLIER + INCREMENT) & MASK
    x ^= x >> 25
    x = (x * MULTIPLIER + INCREMENT) & MASK
    return x ^ x >> 25


@device
def start_draws(draws, seed, turn, actor):
    """Begin the numbers of one actor in one turn. draws: int64 [1], the generator's state."""
    draws[0] = scramble(scramble(scramble(seed & MASK) ^ turn) ^ (actor + 1))


@device
def draw(draws, n):
    """A number of 0 to n - 1, n < 2**32."""
    draws[0] = (draws[0] * MULTIPLIER + INCREMENT) & MASK
    return (draws[0] >> 16) % n


@device
def chance(draws, thousandths):
    """True in this many of a thousand cases."""
    return draw(draws, THOUSAND) < thousandths
