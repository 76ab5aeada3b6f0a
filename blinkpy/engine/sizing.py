"""Computes all sizes (queues, pages, batches) from options and a model. Pure arithmetic; nothing is allocated
here.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.model_files import open_file, read_bytes
from blinkpy.models.weights.stored_tensor import weight_files
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.words import digest_of_bytes

ARENA_PROMPTS = 4  # capacity of an arena, in prompts of maximum length
ARENA_MINIMUM = 1 << 16  # tokens
ARENA_GRAMMARS = 4  # capacity for grammars of maximum size if the option is 0
FEWEST_GRAMMARS = 2  # one request's automaton and token rules
HISTORY_LIMIT = 8 << 30  # maximum bytes of an engine's token history


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of one engine. max_model_len and page_size are in tokens."""

    queue: QueueSizes
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int

    @property
    def slots(self) -> int:
        """Requests in flight over all queue pairs."""
        return self.queue.pairs * self.queue.slots


def pages_for(tokens: int, page_size: int) -> int:
    """Pages for a number of tokens."""
    return -(-tokens // page_size)


def grammar_words(config: Config) -> int:
    """Words of the largest grammar; 0 if grammars are disabled."""
    return (config.engine.grammar_kib << 10) // 4 if config.engine.grammar_slots else 0


def grammar_arena(config: Config) -> int:
    """The words of a prompt arena that are reserved for grammars. Raises ConfigError if the option is too small."""
    words, asked = grammar_words(config), (config.queue.grammar_arena_kib << 10) // 4
    if words and 0 < asked < FEWEST_GRAMMARS * words:
        kib = config.queue.grammar_arena_kib, config.engine.grammar_kib
        raise ConfigError(
            f"grammar_arena_kib ({kib[0]}) is too small: it must hold a grammar and token rules of grammar_kib ({kib[1]}) each"
        )
    return (asked or ARENA_GRAMMARS * words) if words else 0


def queue_sizes(config: Config, max_model_len: int) -> QueueSizes:
    """Sizes of the queue pairs of an engine whose sequences have at most max_model_len tokens."""
    queue = config.queue
    arena_tokens = queue.prompt_arena_tokens or max(ARENA_PROMPTS * max_model_len, ARENA_MINIMUM)
    return QueueSizes(
        pairs=config.frontend.workers,
        slots=config.worker_slots,
        sq_entries=queue.sq_entries or 1 << max(1, (config.worker_slots - 1).bit_length()),
        cq_entries=queue.cq_entries,
        prompt_tokens=arena_tokens + grammar_arena(config),
        hash_entries=max(1, arena_tokens // config.cache.page_size),
    )


def engine_sizes(config: Config, context_limit: int, page_bytes: int, cache_bytes: int) -> EngineSizes:
    """Sizes for a model.

    context_limit: the model's maximum context, tokens.
    page_bytes: bytes of keys and values of one page over all layers.
    cache_bytes: memory for the KV cache, used if num_pages is 0.

    Raises ConfigError, with both figures, if the options do not fit.
    """
    page_size = config.cache.page_size
    asked = config.model.max_model_len
    if asked > context_limit:
        raise ConfigError(f"max_model_len ({asked}) exceeds the model's context length of {context_limit} tokens")
    if asked == 1:
        raise ConfigError("max_model_len must be at least 2: one prompt token and one output token")
    num_pages = config.cache.num_pages or cache_bytes // page_bytes
    # By default, model and cache limit the context. An explicit context must fit.
    max_model_len = asked or min(context_limit, num_pages * page_size)
    if pages_for(max_model_len, page_size) > num_pages or max_model_len < 2:
        needed = pages_for(max(asked, 2), page_size)
        raise ConfigError(
            f"the KV cache is too small for one request of {max(asked, 2)} tokens: it needs {needed} pages, "
            f"but there are {num_pages} ({needed * page_bytes / 2**20:.1f} MiB of {num_pages * page_bytes / 2**20:.1f} MiB)"
        )
    if not config.cache.num_pages:
        # Pages beyond the capacity of all slots serve only the prefix cache: reserve as many again for
        # it.
        most = 2 * config.all_slots * pages_for(max_model_len, page_size)
        num_pages = min(num_pages, most, 1 << 24)
    sizes = EngineSizes(
        queue=queue_sizes(config, max_model_len),
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=min(config.scheduler.max_num_seqs, config.all_slots),
    )
    arena_tokens = sizes.queue.prompt_tokens - grammar_arena(config)
    if arena_tokens < max_model_len:
        raise ConfigError(f"prompt_arena_tokens ({arena_tokens}) must hold one prompt of max_model_len ({max_model_len}) tokens")
    history = sizes.slots * max_model_len * 4
    if history > HISTORY_LIMIT:
        raise ConfigError(
            f"{sizes.slots} slots of {max_model_len} tokens each need {history / 2**30:.1f} GiB of token history, "
            f"but the limit is {HISTORY_LIMIT >> 30} GiB: lower slots, workers or max_model_len"
        )
    return sizes


SAMPLES, SAMPLE_BYTES = 64, 4096  # per file, evenly spaced: enough, because different weights differ nearly everywhere


def model_digest(config: Config, folder: Path, reads_weights: bool) -> int:
    """A digest of the model's config, samples of its weights, and the options that change its results.

    reads_weights: whether the device reads weights.
    """
    options = config.model.quantization, config.model.load_format, config.cache.kv_cache_dtype, config.cache.window_cache
    dummy = config.model.seed if config.model.load_format == "dummy" else None
    digest = hashlib.sha256(repr((options, config.model.dtype, dummy, reads_weights)).encode())
    digest.update(read_bytes(folder, "config.json"))
    if reads_weights and dummy is None:
        for path in weight_files(folder):
            with open_file(folder, path.name) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode())
                for sample in range(SAMPLES):
                    file.seek(sample * size // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest_of_bytes(digest.digest())


logger = logging.getLogger("blinkpy.engine")


def read_token_bytes(folder: Path, vocab_size: int) -> TokenBytes | None:
    """The bytes of a model's tokens, for grammars.

    None, with a log line, if the folder has no readable tokenizer, or if a token's bytes depend on its
    neighbours.
    """
    from blinkpy.dpu.text.detokenizer import TokenTexts
    from blinkpy.dpu.text.tokenizer import token_pieces
    from blinkpy.dpu.text.tokenizer_files import read_encoder

    try:
        encoder = read_encoder(folder)
    except ConfigError as error:
        logger.warning("grammars are disabled: %s", error)
        return None
    pieces = TokenTexts(encoder).pieces
    if pieces is None:
        logger.warning("grammars are disabled: the bytes of some tokens depend on earlier tokens")
        return None
    return TokenBytes.of(token_pieces(encoder, pieces), vocab_size)


DEVICES = Path("/sys/bus/pci/devices")


def cores_near(address: str) -> frozenset[int]:
    """The cores of a PCI device's NUMA node that this thread may run on; empty if unknown.

    address: such as 0000:18:00.0.
    """
    try:
        listed = (DEVICES / address / "local_cpulist").read_text()
        return frozenset(_cores_of(listed)) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return frozenset()


def _cores_of(listed: str) -> Iterator[int]:
    """The cores in a list in Linux's format, such as 0-15,32."""
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextlib.contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread to these cores within the block; an empty set: all cores."""
    allowed = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
