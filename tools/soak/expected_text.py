"""The expected output of the null engine, computed independently from a request's seed."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from blinkpy.models.weights.model_folder import DEMO_FOLDER

MODULUS = 2**31 - 1
CUT = "\ufffd"  # instead of invalid bytes


class ExpectedText:
    """Outputs of the null engine with the demonstration model's vocabulary. folder: folder of the tokenizer."""

    def __init__(self, folder: Path = DEMO_FOLDER):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._size = json.loads((folder / "config.json").read_text())["vocab_size"]

    def token(self, seed: int, position: int) -> int:
        """The token that the null engine prefers at a position of the sequence."""
        mixed = (seed % MODULUS * 48271 + position * 69621 + 1) % MODULUS
        low = self._size // 16
        return low + mixed * 48271 % MODULUS * 69621 % MODULUS % (self._size - low)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def free(self, seed: int, prompt_length: int, count: int) -> str:
        """The text of `count` tokens without any rule, without an incomplete character at its end."""
        return self.decode([self.token(seed, prompt_length + i) for i in range(count)]).rstrip(CUT)

    def chosen(self, seed: int, prompt_length: int, choices: tuple[str, ...]) -> str:
        """The choice in `choices` (ASCII only) that the engine produces: each token is the first legal one from the
        preferred one on."""
        text, position, end = "", prompt_length, 1
        while True:
            wanted = self.token(seed, position)
            for token in (*range(wanted, self._size), *range(wanted)):
                if token == end and text in choices:
                    return text
                piece = self._piece(token)
                if piece and any(choice.startswith(text + piece) for choice in choices):
                    break
            else:
                raise AssertionError(f"no token continues {text!r}")
            text, position = text + piece, position + 1

    @cache  # noqa: B019 - there is one
    def _piece(self, token: int) -> str:
        """A token's text; "" for a special token."""
        return self.decode([token]) if token > 15 else ""
