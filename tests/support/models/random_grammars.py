"""Grammars of random requests for tests of samplers, and which tokens they allow, by a walk of their own over every token."""

import numpy as np
import torch
from support.automata import random_automaton

from blinkpy.kernels.sampling.mask_illegal import GrammarView
from blinkpy.kv.state import Grammars
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues import submission as E
from blinkpy.queues.byte_automaton import DEAD

GRAMMARS = 5


class RandomGrammars:
    """Half of the requests have one, each in a random state. pieces: the bytes of each token, up to ten; some have none."""

    def __init__(self, rng: np.random.Generator, slots: int, vocabulary: int):
        self.automata = [random_automaton(rng, states=9, classes=4, dead=0.2) for _ in range(GRAMMARS)]
        lengths = rng.choice([0, 1, 1, 2, 3, 4, 5, 10], vocabulary)
        self.pieces = [rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in lengths]
        packed = [automaton.words() for automaton in self.automata]
        self._words = np.zeros((GRAMMARS, max(map(len, packed)) + 3), np.int32)
        for i, words in enumerate(packed):
            self._words[i, : len(words)] = words
        self.slot = np.where(rng.random(slots) < 0.5, rng.integers(0, GRAMMARS, slots), -1).astype(np.int32)
        self.state = rng.integers(0, 9, slots).astype(np.int32)

    def constrain(self, entry: np.ndarray) -> None:
        """Set the word of the entries, int32 [S, 64], that says whether a request has a grammar. One that would leave none or one
        of the tokens that are no stop ids gets none."""
        for slot in range(len(self.slot)):
            stop_ids = entry[slot, E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS]
            legal = self.legal(slot, stop_ids)
            legal[stop_ids[stop_ids >= 0]] = False
            self.slot[slot] = self.slot[slot] if legal.sum() > 1 else -1
        entry[:, E.WORD_GRAMMAR_WORDS] = self.slot >= 0

    def arrays(self) -> Grammars:
        """As the scheduler has them; what samplers do not read is empty."""
        none = np.zeros(0, np.int64)
        return Grammars(none, none, none, self._words, *TokenBytes.of(self.pieces, len(self.pieces)))

    def view(self, device: str) -> GrammarView:
        grammars = self.arrays()
        arrays = (grammars.words, grammars.token_place, grammars.token_bytes, self.slot, self.state)
        return GrammarView(*(torch.from_numpy(array.copy()).to(device) for array in arrays))

    def legal(self, slot: int, stop_ids: np.ndarray) -> np.ndarray:
        """Whether each token may come next in a request: bool [V]."""
        if self.slot[slot] < 0:
            return np.ones(len(self.pieces), bool)
        automaton, state = self.automata[self.slot[slot]], int(self.state[slot])
        legal = np.array([bool(piece) and automaton.advance(state, piece) != DEAD for piece in self.pieces])
        for stop in stop_ids[stop_ids >= 0]:
            legal[stop] = automaton.accepting[state]
        return legal


def no_grammars(slots: int, device: str) -> GrammarView:
    """Of requests that have none."""
    shapes = ((1, 1), (1, 2), (1,), (slots,), (slots,))
    return GrammarView(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
