"""Grammars and token rules of random requests, for tests of samplers, and their effect on logits: by a separate walk over every
token, and by the rules' definition."""

import numpy as np
import torch
from support.automata import random_automaton, random_counted_automaton, random_position
from support.expected_request import bytes_to_an_end

from blinkpy.kernels.sampling.candidates import GrammarView
from blinkpy.kv.grammars import NO_LIMIT
from blinkpy.kv.state import DRAFT_PLACES, Grammars
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues import submission as E
from blinkpy.queues.byte_automaton import DEAD, FARTHEST_WORD
from blinkpy.queues.token_rules import SEQUENCE_TOKENS, TokenRules

GRAMMARS, COUNTED = 5, 3  # the last two have a counted string
RULES = 6


class RandomGrammars:
    """Random grammars: half of the requests have a grammar, in a random state, and half have token rules. pieces: the bytes of
    each token, up to ten; some are empty."""

    def __init__(self, rng: np.random.Generator, slots: int, vocabulary: int):
        self.automata = [random_automaton(rng, states=9, classes=4, dead=0.2) for _ in range(GRAMMARS - COUNTED)]
        self.automata += [random_counted_automaton(rng) for _ in range(COUNTED)]
        lengths = rng.choice([0, 1, 1, 2, 3, 4, 5, 10], vocabulary)
        self.pieces = [rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in lengths]
        self.rules = [random_rules(rng, vocabulary) for _ in range(RULES)]
        packed = [automaton.words() for automaton in self.automata] + [rules.words() for rules in self.rules]
        self._words = np.full((len(packed), max(map(len, packed)) + 3), -1, np.int32)
        for i, words in enumerate(packed):
            self._words[i, : len(words)] = words
        self.slot = np.full(slots, -1, np.int32)
        self.state = np.zeros(slots, np.int64)
        self.choose(rng, np.where(rng.random(slots) < 0.5, rng.integers(0, GRAMMARS, slots), -1))
        self.ruled = np.where(rng.random(slots) < 0.5, GRAMMARS + rng.integers(0, RULES, slots), -1).astype(np.int32)

    def choose(self, rng: np.random.Generator, grammars: np.ndarray) -> None:
        """Give each request the grammar with this number, or no grammar (-1), in a random state."""
        self.slot[:] = grammars
        self.state[:] = [random_position(rng, self.automata[own]) for own in self.slot.tolist()]

    def constrain(self, entry: np.ndarray) -> None:
        """Set the words of the entries, int32 [S, 64], that state whether a request has a grammar and token rules. Drops grammars
        and rules that leave fewer than two tokens other than stop ids."""
        for slot in range(len(self.slot)):
            stop_ids = entry[slot, E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS]
            legal = self.legal(slot, stop_ids)
            legal[stop_ids[stop_ids >= 0]] = False
            self.slot[slot] = self.slot[slot] if legal.sum() > 1 else -1
            left = np.where(self.legal(slot, stop_ids), 0.0, -np.inf)
            left[stop_ids[stop_ids >= 0]] = -np.inf
            if self.ruled[slot] >= 0:
                left[[sequence[-1] for sequence in self.rules[self.ruled[slot] - GRAMMARS].banned]] = -np.inf
            self.ruled[slot] = self.ruled[slot] if np.isfinite(self.under_rules(slot, left, [])).sum() > 1 else -1
        entry[:, E.WORD_GRAMMAR_WORDS] = self.slot >= 0
        entry[:, E.WORD_RULES_WORDS] = self.ruled >= 0

    def under_rules(self, slot: int, logits: np.ndarray, output: list[int]) -> np.ndarray:
        """The logits, [V], after the rules of a request with this output."""
        if self.ruled[slot] < 0:
            return logits
        rules, changed = self.rules[self.ruled[slot] - GRAMMARS], logits.copy()
        for token, bias in rules.biases.items():
            changed[token] += np.float32(bias)
        for *before, last in rules.banned:
            if output[len(output) - len(before) :] == before and len(output) >= len(before):
                changed[last] = -np.inf
        if rules.allowed is not None:
            changed[np.setdiff1d(np.arange(len(changed)), rules.allowed)] = -np.inf
        return changed

    def most_distance(self, slot: int, entry: np.ndarray, generated: int) -> int:
        """The `most` of `legal` for a request's next token. entry: int32 [64]; generated: tokens of the output, including that
        token."""
        if self.slot[slot] < 0 or self.ruled[slot] >= 0:
            return NO_LIMIT
        automaton, state, left = self.automata[self.slot[slot]], int(self.state[slot]), int(entry[E.WORD_MAX_TOKENS]) - generated
        stops = entry[E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS].max() >= 0 and generated > entry[E.WORD_MIN_TOKENS]
        far = bytes_to_an_end(automaton)
        free = left >= automaton.words()[FARTHEST_WORD] or far[state] > left + 1
        return NO_LIMIT if free or (automaton.may_end(state) and not stops) else left

    def arrays(self) -> Grammars:
        """The scheduler's arrays of grammars; fields that samplers do not read are empty."""
        none = np.zeros(0, np.int64)
        return Grammars(none, none, none, self._words, *TokenBytes.of(self.pieces, len(self.pieces)))

    def view(self, rng: np.random.Generator, device: str, drafted: dict[int, int] | None = None) -> GrammarView:
        """The device's view. drafted: tokens before the next token of requests whose next token follows drafts; without their
        drafts, they are in another state. All other places have random states. None: no places for drafts."""
        grammars, state = self.arrays(), self.state.copy()
        drafts = np.zeros((len(state), 1 if drafted is None else DRAFT_PLACES), np.int64)
        for slot, own in enumerate(self.slot.tolist() if drafted is not None else ()):
            drafts[slot] = [random_position(rng, self.automata[own]) for _ in range(DRAFT_PLACES)]
            if slot in (drafted or {}):
                drafts[slot, drafted[slot] % DRAFT_PLACES] = state[slot]
                state[slot] = random_position(rng, self.automata[own])
        arrays = (grammars.words, grammars.token_place, grammars.token_bytes, self.slot, state, self.ruled, drafts)
        return GrammarView(*(torch.from_numpy(array.copy()).to(device) for array in arrays))

    def legal(self, slot: int, stop_ids: np.ndarray, most: int = NO_LIMIT) -> np.ndarray:
        """Whether each token may come next in a request: bool [V]. most: bytes from the state after it to an end."""
        if self.slot[slot] < 0:
            return np.ones(len(self.pieces), bool)
        automaton, state = self.automata[self.slot[slot]], int(self.state[slot])
        far = bytes_to_an_end(automaton) | {DEAD: 1 << 30}
        legal = np.array([bool(piece) and far[automaton.advance(state, piece)] <= most for piece in self.pieces])
        for stop in stop_ids[stop_ids >= 0]:
            legal[stop] = automaton.may_end(state)
        return legal


def random_rules(rng: np.random.Generator, vocabulary: int) -> TokenRules:
    """At least one bias of each sign, banned sequences of any length, and usually a set of allowed tokens. Few different tokens
    precede the banned token, so that short sequences occur."""
    biased = rng.choice(vocabulary, rng.integers(1, min(vocabulary, 700) + 1), replace=False).tolist()
    lengths = rng.choice([1, 2, 2, 3, SEQUENCE_TOKENS], rng.integers(0, 40)).tolist()
    few = min(vocabulary, 4)
    banned = [[*rng.integers(0, few, length - 1).tolist(), int(rng.integers(vocabulary))] for length in lengths]
    allowed = rng.choice(vocabulary, rng.integers(vocabulary // 4, vocabulary), replace=False).tolist()
    biases = {token: float(rng.normal() * 4) for token in biased}
    return TokenRules(vocabulary, biases, allowed if rng.random() < 0.6 else None, banned)


def no_grammars(slots: int, device: str) -> GrammarView:
    """The view of requests without grammars and rules."""
    shapes = ((1, 1), (1, 2), (1,), (slots,), (slots,), (slots,), (slots, 1))
    view = GrammarView(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
    return view._replace(state=view.state.long(), draft_states=view.draft_states.long())
