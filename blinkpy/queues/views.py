"""The engine's view of a whole queue segment, as NumPy arrays over its memory; the layout is that of blinkpy.queues.layout."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.array_types import Int32, Int64
from blinkpy.queues.layout import BLOCK_WORDS, PAIR_WORDS, QueueLayout
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import SQ_ENTRY_WORDS


class EngineViews(NamedTuple):
    """The whole segment as the engine sees it. Q pairs, L slots a pair; arrays are strided over the pairs."""

    engine: Int64  # [BLOCK_WORDS]
    control: Int64  # [BLOCK_WORDS]
    front: Int64  # [Q, PAIR_WORDS], the front ends' words
    sq: Int32  # [Q, sq_entries, 64]
    sq_long: Int64  # [Q, sq_entries, 32], the same memory
    cancel: Int64  # [Q, L], request id to cancel
    hashes: Int64  # [Q, hash_entries]
    prompt: Int32  # [Q, prompt_tokens]
    pair: Int64  # [Q, PAIR_WORDS], the engine's words
    cq: Int64  # [Q, cq_entries]
    records: Int64  # [Q, cq_entries, LOGPROB_ENTRIES], LOGPROB_ENTRY in each word
    hits: Int64  # [Q, L], hit words


def engine_views(buffer: memoryview, layout: QueueLayout) -> EngineViews:
    """Views of a writable segment for the engine; no copies."""
    sizes, front, engine = layout.sizes, layout.front_region(0), layout.engine_region(0)

    def over_pairs(offset: int, dtype: type, *shape: int) -> NDArray:
        inner = np.zeros(shape, dtype).strides
        return np.ndarray((sizes.pairs, *shape), dtype, buffer, offset, (layout.pair_bytes, *inner))

    return EngineViews(
        engine=np.ndarray((BLOCK_WORDS,), np.int64, buffer, layout.engine_words),
        control=np.ndarray((BLOCK_WORDS,), np.int64, buffer, layout.control_words),
        front=over_pairs(front, np.int64, PAIR_WORDS),
        sq=over_pairs(front + layout.sq, np.int32, sizes.sq_entries, SQ_ENTRY_WORDS),
        sq_long=over_pairs(front + layout.sq, np.int64, sizes.sq_entries, SQ_ENTRY_WORDS // 2),
        cancel=over_pairs(front + layout.cancel, np.int64, sizes.slots),
        hashes=over_pairs(front + layout.hashes, np.int64, sizes.hash_entries),
        prompt=over_pairs(front + layout.prompt, np.int32, sizes.prompt_tokens),
        pair=over_pairs(engine, np.int64, PAIR_WORDS),
        cq=over_pairs(engine + layout.cq, np.int64, sizes.cq_entries),
        records=over_pairs(engine + layout.records, np.int64, sizes.cq_entries, LOGPROB_ENTRIES),
        hits=over_pairs(engine + layout.hits, np.int64, sizes.slots),
    )
