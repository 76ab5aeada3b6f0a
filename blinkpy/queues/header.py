"""The header of a segment, by which a front end detects another build or another engine before it reads anything else."""

from dataclasses import asdict, fields
from typing import NamedTuple

import numpy as np

from blinkpy.queues.completion import CQ_ENTRY_BYTES
from blinkpy.queues.layout import LayoutError, QueueLayout, QueueSizes
from blinkpy.queues.logprob_record import RECORD_BYTES
from blinkpy.queues.submission import SQ_ENTRY_BYTES, SQ_ENTRY_FIELDS

MAGIC = b"BLINKPYQ"
VERSION = 7


class EngineFacts(NamedTuple):
    """Properties of the engine that front ends need for checking requests."""

    instance: int  # random; a front end notices by it that the engine was restarted
    hash_multiplier_1: int  # secret of this engine: page hashes can't be steered from outside
    hash_multiplier_2: int
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int
    lease_ms: int
    grammar_share: int = 0  # different grammars and token rules that the requests of a queue pair may have at a time; 0: none
    grammar_words: int = 0  # of the largest packed automaton or token rules
    grammar_arena: int = 0  # words at the end of the prompt arena, where front ends keep these
    model_digest: int = 0  # of the weights and the options that change their values; 0: unknown
    tokenizer_digest: int = 0


_LONG = ("instance", "hash_multiplier_1", "hash_multiplier_2", "model_digest", "tokenizer_digest")
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("total_bytes", "<u8"),
        *((field.name, "<u4") for field in fields(QueueSizes)),
        ("sq_entry_bytes", "<u4"),
        ("cq_entry_bytes", "<u4"),
        ("record_bytes", "<u4"),
        ("sq_entry_fields", "<u4"),  # checksum of the names, types and places of an entry's fields
        *((name, "<i8" if name in _LONG else "<u4") for name in EngineFacts._fields),
    ],
    align=True,
)
BUILD = {  # must be equal on both sides
    "version": VERSION,
    "header_bytes": HEADER.itemsize,
    "sq_entry_bytes": SQ_ENTRY_BYTES,
    "cq_entry_bytes": CQ_ENTRY_BYTES,
    "record_bytes": RECORD_BYTES,
    "sq_entry_fields": SQ_ENTRY_FIELDS,
}


def write_header(buffer: memoryview, sizes: QueueSizes, facts: EngineFacts) -> QueueLayout:
    """Fill in the header of a zeroed segment. The magic is written last: a front end sees a whole header or none."""
    layout = QueueLayout(sizes)
    if len(buffer) < layout.total_bytes:
        raise LayoutError(f"the segment has {len(buffer)} bytes, but the layout needs {layout.total_bytes}")
    header = np.ndarray((1,), HEADER, buffer)
    for name, value in (BUILD | asdict(sizes) | facts._asdict()).items():
        header[name] = value
    header["total_bytes"] = layout.total_bytes
    header["magic"] = MAGIC
    return layout


def read_header(buffer: memoryview | bytes) -> tuple[QueueLayout, EngineFacts]:
    """Layout and facts of the engine from a segment's header. Raises LayoutError, naming both sides, on a
    mismatch.
    """
    if len(buffer) < HEADER.itemsize:
        raise LayoutError(f"a queue segment has a header of {HEADER.itemsize} bytes, but this one has only {len(buffer)} bytes")
    header = np.frombuffer(buffer, HEADER, 1)[0]
    magic = bytes(header["magic"])
    if magic != MAGIC:
        raise LayoutError(f"not a blinkpy queue segment: the engine wrote {magic!r}, but this front end expects {MAGIC!r}")
    for name, value in BUILD.items():
        if int(header[name]) != value:
            raise LayoutError(f"queue layout mismatch: the engine has {name} {int(header[name])}, but this front end has {value}")
    layout = QueueLayout(QueueSizes(**{field.name: int(header[field.name]) for field in fields(QueueSizes)}))
    total, own = int(header["total_bytes"]), layout.total_bytes
    if total != own:
        raise LayoutError(f"queue layout mismatch: the engine has total_bytes {total}, but this front end computes {own}")
    engine = EngineFacts(*(int(header[name]) for name in EngineFacts._fields))
    if engine.grammar_arena >= layout.sizes.prompt_tokens:
        room = f"{layout.sizes.prompt_tokens} words of the prompt arena"
        raise LayoutError(f"grammar_arena leaves no space for prompts: the engine has {engine.grammar_arena} of {room} bytes")
    return layout, engine
