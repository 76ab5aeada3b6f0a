"""Special tokens, `<|im_start|>` and the like: which texts stand for them, and which are only spelled like them.

A model takes a special token for a control mark: who can write one into a prompt can speak as somebody else. So the encoder
here takes no text for a special token. Those that a chat template writes, or a client that asked for it, are replaced by
aliases, tokens of random names, before the text is encoded; everything else is encoded as the characters that it has. Texts of
clients go through a template with random marks in the places of what is spelled like a special token. A text that could become
the start or the end of one beside another text has a mark there, too.
"""

import re
import secrets
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy.config import ConfigError
from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.words import Int32

# Their values are words of the API. Templates make special tokens of some, '<|' + role + '|>', and compare with others.
WORD_KEYS = frozenset({"role", "type"})
LONGEST, MOST_CHARACTERS = 256, 1 << 21  # of special tokens: their beginnings and ends are listed, each


class SpecialTokens:
    """Takes over an encoder: adds the aliases to it, and from now on it takes no text for a special token."""

    def __init__(self, encoder: Encoder):
        added = encoder.get_added_tokens_decoder()
        special = {token.content: (number, token) for number, token in added.items() if token.special and token.content}
        names = sorted(special, key=len, reverse=True)  # of two that begin alike the longer one counts
        if len(names[0] if names else "") > LONGEST or sum(map(len, names)) > MOST_CHARACTERS:
            limits = f"{LONGEST} characters each and {MOST_CHARACTERS:,} together"
            raise ConfigError(f"the tokenizer's special tokens are too long (limits: {limits})")
        nonce = str(secrets.randbelow(10**18))
        self._aliases = {name: f"\ue000{nonce}.{i}\ue001" for i, name in enumerate(names)}
        taken = {*encoder.get_vocab(with_added_tokens=True).values(), *added}
        meant: dict[int, int] = {}  # alias to special token
        encoder.encode_special_tokens = True
        aliases = []
        for name in names:
            _, token = special[name]
            # Found before a normalizer changes the text: one that puts spaces in front would hide all but the first.
            how = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": False}
            aliases.append(AddedToken(self._aliases[name], special=False, **how))
        encoder.add_tokens(aliases)  # in one call: each rebuilds the automaton over all added tokens
        for name in names:
            meant[int(encoder.token_to_id(self._aliases[name]) or 0)] = special[name][0]
        if taken & meant.keys():
            raise ConfigError(f"the tokenizer's ids have gaps: {sorted(taken & meant.keys())[:3]} would be assigned twice")
        self._first_alias = min(meant, default=INT32_MAX)
        self._ids = np.array([meant[alias] for alias in sorted(meant)], np.int32)  # those of aliases follow each other
        patterns = [rf"(?<!\w){re.escape(n)}(?!\w)" if special[n][1].single_word else re.escape(n) for n in names]
        self.names = re.compile("|".join(patterns) or r"(?!)")  # finds what is spelled like one
        self._heads = {name[:end] for name in names for end in range(1, len(name))}
        self._tails = {name[start:] for name in names for start in range(1, len(name))}
        self._all_names = "\0".join(names)
        self._longest = max(map(len, names), default=1)
        # Letters and digits alone, which the filters of templates leave as they are, except capitals.
        self._marks = {name: f"xq{nonce}m{i}x" for i, name in enumerate(names)}
        self._border, self.end_mark = f"xq{nonce}bx", f"xq{nonce}ex"
        self._any_mark = re.compile(f"xq{nonce}(?:m([0-9]+)|b)x", re.IGNORECASE)
        self._listed = names

    def mark(self, value: Any) -> Any:
        """A JSON value for a chat template, with marks in its texts. What needs none is returned as it is."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            # Templates look for keys by name: one that is no special token stays unchanged.
            return {self._mark_names(key): self._mark_value(key, item) for key, item in value.items()}
        return value

    def _mark_value(self, key: str, value: Any) -> Any:
        if key in WORD_KEYS and isinstance(value, str):
            return self._mark_names(value)
        return self.mark(value)

    def _mark_names(self, text: str) -> str:
        return self.names.sub(lambda found: self._marks[found[0]], text)

    def _mark_text(self, text: str) -> str:
        marked = self._mark_names(text)
        body = marked.strip()  # as templates do
        if not body:
            return marked
        lengths = range(1, min(len(body), self._longest - 1) + 1)
        within = len(body) < self._longest and body in self._all_names
        before = within or any(body[:length] in self._tails for length in lengths)
        after = within or any(body[-length:] in self._heads for length in lengths)
        if before or after:
            start = len(marked) - len(marked.lstrip())
            end = start + len(body)
            body = (self._border if before else "") + body + (self._border if after else "")
            marked = marked[:start] + body + marked[end:]
        return marked

    def unmark(self, text: str) -> str:
        """The text without marks, as people read it."""
        return self._any_mark.sub(lambda found: self._listed[int(found[1])] if found[1] else "", text)

    def aliased(self, text: str) -> str:
        """A text whose special tokens are meant, except marked ones, as it is encoded."""
        return self.unmark(self.names.sub(lambda found: self._aliases[found[0]], text))

    def resolved(self, ids: Int32) -> Int32:
        """Token ids with those of special tokens in the places of their aliases. ids: int32 [n], changed in place."""
        if not ids.size or np.maximum.reduce(ids) < self._first_alias:
            return ids
        aliases = ids >= self._first_alias
        ids[aliases] = self._ids[ids[aliases] - self._first_alias]
        return ids
