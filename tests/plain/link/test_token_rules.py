"""The packed form of token rules: there and back, and the engine's use of it.

Supports claim outputs/grammars.
"""

import numpy as np
import pytest
from support.automata import WordsOfSlot
from support.models.random_grammars import random_rules

from blinkpy.kv.grammar_checks import are_token_rules
from blinkpy.kv.grammars import is_allowed
from blinkpy.kv.limits import Limits
from blinkpy.queues import token_rules as R
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import DIGEST_BITS, digest_of


def limits_of(vocab_size: int) -> Limits:
    return Limits(**dict.fromkeys(Limits._fields, 0) | {"vocab_size": vocab_size})


def test_the_packed_form_gives_the_rules_back(rng: np.random.Generator) -> None:
    digests = set()
    for vocabulary in rng.integers(8, 200, 40).tolist():
        rules = random_rules(rng, vocabulary)
        again = TokenRules.of_words(rules.words(), vocabulary)
        assert again.biases == {token: float(np.float32(bias)) for token, bias in rules.biases.items()}
        assert again.allowed == (None if rules.allowed is None else sorted(rules.allowed))
        assert [list(one) for one in again.banned] == [list(one) for one in rules.banned]
        assert again.digest == rules.digest and not rules.words().flags.writeable
        digests.add(rules.digest)
        words = WordsOfSlot(rules.words(), 1)
        allowed = [is_allowed(words, 1, token) for token in range(vocabulary)]
        assert np.flatnonzero(allowed).tolist() == (again.allowed or list(range(vocabulary)))
    assert len(digests) == 40


def test_the_engine_takes_what_are_rules(rng: np.random.Generator) -> None:
    """One or two words are anything: the engine takes what TokenRules takes."""
    seen = {False: 0, True: 0}
    for _ in range(1500):
        vocabulary = int(rng.integers(6, 70))
        words = random_rules(rng, vocabulary).words().copy()
        biases, sequences = int(words[R.BIASES_WORD]), int(words[R.SEQUENCES_WORD])
        for _ in range(rng.integers(0, 3)):
            ends = [R.FIRST_WORD, R.FIRST_WORD + biases, R.FIRST_WORD + 2 * biases, R.FIRST_WORD + 2 * biases + 16 * sequences]
            places = [0, 1, 2, 3, len(words) - 1, *(end - 1 for end in ends), *ends, rng.integers(len(words))]
            place = min(int(rng.choice(places)), len(words) - 1)
            highest = R.HIGHEST_BIAS_BITS, R.HIGHEST_BIAS_BITS + 1
            new = rng.choice([words[place] + 1, words[place] - 1, -1, 0, vocabulary, vocabulary - 1, *highest])
            words[place] = new if rng.random() < 0.7 else words[place] ^ 1 << int(rng.integers(0, 31))
        try:
            TokenRules.of_words(words, vocabulary)
            fine = True
        except ValueError:
            fine = False
        arguments = limits_of(vocabulary), WordsOfSlot(words, 1), 1, len(words)
        assert are_token_rules(*arguments, 0, 1) == fine, words.tolist()
        seen[fine] += 1
    assert min(seen.values()) > 200


def test_each_word_changes_the_digest(rng: np.random.Generator) -> None:
    words = random_rules(rng, 60).words()
    changed = words + np.eye(len(words), dtype=np.int32)  # another word in each row
    digests = {digest_of(each) for each in (words, words[:-1], *changed)}
    assert len(digests) == len(words) + 2
    assert max(digests).bit_length() == DIGEST_BITS, "all of its bits are used"


MOST = R.MOST_BIASES, R.MOST_SEQUENCES


@pytest.mark.parametrize(
    ("biases", "sequences", "fine"),
    [(*MOST, True), (0, 1, True), (MOST[0] + 1, 1, False), (1, MOST[1] + 1, False), (-8, 2, False), (16, -1, False)],
)
@pytest.mark.parametrize("vocabulary", [2000, 2016])
def test_counts_of_rules_are_bounded(biases: int, sequences: int, fine: bool, vocabulary: int) -> None:
    """The engine and TokenRules take the same ones. If a count is negative, the whole has the stated length."""
    banned = np.full((max(0, sequences), R.SEQUENCE_TOKENS), R.ANY_TOKEN)
    banned[:, -1] = np.arange(len(banned))
    mask = np.full(R.bitmask_words(vocabulary), -1)
    mask[-1] = (1 << (vocabulary % 32)) - 1 if vocabulary % 32 else -1
    parts = [R.MARK, biases, sequences, len(mask)], np.arange(biases), np.zeros(max(0, biases)), banned.reshape(-1), mask
    whole = np.concatenate(parts).astype(np.int32)
    words = whole[: R.FIRST_WORD + 2 * biases + R.SEQUENCE_TOKENS * sequences + len(mask)]
    assert are_token_rules(limits_of(vocabulary), WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine
    if fine:
        assert len(TokenRules.of_words(words, vocabulary).biases) == biases
    else:
        with pytest.raises(ValueError, match="count"):
            TokenRules.of_words(words, vocabulary)


def test_empty_words_are_no_token_rules() -> None:
    nothing = np.array([R.MARK, 0, 0, 0], np.int32)
    for length in range(len(nothing) + 1):
        with pytest.raises(ValueError, match="the words are not token rules"):
            TokenRules.of_words(nothing[:length], 8)


def test_rules_for_another_vocabulary_are_refused() -> None:
    words = TokenRules(64, {3: 1.5}, allowed=[1, 3]).words()
    assert TokenRules.of_words(words, 33).allowed == [1, 3], "its bitmask has as many words"
    for vocabulary in (32, 65):
        with pytest.raises(ValueError, match="the bitmask of token rules has the size of another vocabulary"):
            TokenRules.of_words(words, vocabulary)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"biases": {8: 1.0}}, "token 8 is not in the vocabulary of 8"),
        ({"biases": {1: float("nan")}}, "a bias is -100 to 100, not nan"),
        ({"biases": {1: -100.1}}, "a bias is"),
        ({"allowed": []}, "no token is allowed"),
        ({"allowed": [-1]}, "token -1"),
        ({"banned": [[]]}, "1 to 16 tokens"),
        ({"banned": [[1] * 17]}, "1 to 16 tokens"),
        ({"banned": [[1]] * 257}, "at most 256 sequences"),
        ({"biases": dict.fromkeys(range(1025), 1.0)}, "at most 1024 tokens"),
    ],
)
def test_out_of_range_rules_are_refused(rules: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TokenRules(8, **{"biases": {}, **rules})


def test_rules_that_allow_no_token_are_refused() -> None:
    """Whether they allow none by themselves, or as the engine reads them."""
    with pytest.raises(ValueError, match="no token is allowed"):
        TokenRules(8, {1: 2.0}, allowed=[])
    words = TokenRules(70, {1: 2.0}, [69], [[3]]).words().copy()
    for last, fine in ((words[-1], True), (0, False)):
        words[-1] = last
        assert are_token_rules(limits_of(70), WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine
