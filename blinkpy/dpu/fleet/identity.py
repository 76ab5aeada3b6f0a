"""Checks that clients can't distinguish the engines, and refuses an engine that differs."""

import json
import threading
from pathlib import Path

from blinkpy.dpu.link.queue_pair import EngineLostError, QueuePair
from blinkpy.model_files import has_file, read_bytes, read_json
from blinkpy.queues.words import digest_of_bytes

Facts = dict[str, int]


# Keys of the other files that change a tokenizer, besides the names of special tokens.
CHANGING = frozenset(
    {
        *("added_tokens_decoder", "extra_special_tokens", "model_specific_special_tokens", "tokenizer_class", "auto_map"),
        *("legacy", "add_prefix_space", "split_special_tokens"),
    }
)


def tokenizer_digest(folder: Path) -> int:
    """Digest of the tokenizer in a model's folder, without its chat template; 0 without a tokenizer. Raises ConfigError."""
    from blinkpy.dpu.text.tokenizer_files import ENCODER, OLD, read_tokenizer_config

    if not has_file(folder, ENCODER):
        return 0
    config = read_tokenizer_config(folder)
    values = {key: value for key, value in config.items() if key in CHANGING or key.endswith("_token")}
    old = {} if "added_tokens_decoder" in config else read_json(folder, OLD, optional=True)
    return digest_of_bytes(read_bytes(folder, ENCODER) + json.dumps([values, old], sort_keys=True).encode())


def identity(pair: QueuePair) -> Facts:
    """The facts that must be equal in all engines, by the names that operators know."""
    facts = pair.facts
    return {
        "model": facts.model_digest,
        "tokenizer": facts.tokenizer_digest,
        "context": pair.context,
        "vocabulary": facts.vocab_size,
        "page size": facts.page_size,
        "longest prompt": pair.longest_prompt,
        "number of grammars": facts.grammar_share,
        "largest grammar": facts.grammar_words,
    }


class IdentityCheck:
    """Compares each engine with the first one. tokenizer: digest of the front end's tokenizer."""

    def __init__(self, tokenizer: int):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # links connect in threads
        self._first: tuple[str, Facts] | None = None

    def check(self, label: str, pair: QueuePair) -> None:
        """Raise EngineLostError that lists the differences if the engine differs from the first one."""
        facts = identity(pair)
        if self._tokenizer and facts["tokenizer"] and facts["tokenizer"] != self._tokenizer:
            raise EngineLostError(f"engine {label} is refused: its tokenizer differs from this front end's")
        with self._lock:
            first, known = self._first = self._first or (label, facts)
        different = [f"{name}{_shown(name, known[name], value)}" for name, value in facts.items() if value != known[name]]
        if different:
            raise EngineLostError(f"engine {label} is refused: it differs from engine {first} in {', '.join(different)}")


def _shown(name: str, first: int, own: int) -> str:
    return "" if name in ("model", "tokenizer") else f" ({own}, not {first})"
