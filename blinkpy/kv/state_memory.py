"""The scheduler's memory: allocates all arrays of State once, for an empty engine; copies and compares
them.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.device.portable import device
from blinkpy.device.tables import named_arrays
from blinkpy.kv import state as kinds
from blinkpy.kv.grammars import NO_LIMIT, follow, is_allowed, most_distance, position_at
from blinkpy.kv.limits import Limits, default_buckets
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.submission import SQ_ENTRY_WORDS, STOP_IDS, WORD_MIN_TOKENS, WORD_STOP_IDS
from blinkpy.queues.words import COUNTER_NAMES, LOGPROB_ENTRIES


@device
def synthetic_choice(grammars, requests, slot, length, token, vocab_size):
    """The token after a request's first `length` tokens, drafts included, if the model proposes `token`.

    For a scored prompt: its next token. Otherwise the first legal token by the grammar, or else by the token
    rules, counting cyclically from `token`; `token` itself if there is no legal token.
    """
    if length < requests.prompt_length[slot]:
        return requests.tokens[slot, length]
    if requests.grammar[slot] < 0 and requests.rules[slot] < 0:
        return token
    generated, position, most = length + 1 - requests.prompt_length[slot], 0, NO_LIMIT
    counts = generated > requests.entry[slot, WORD_MIN_TOKENS]
    if requests.grammar[slot] >= 0:
        position = position_at(requests, slot, length)
        most = most_distance(grammars, requests, slot, position, generated)
    for i in range(vocab_size):
        candidate = (token + i) % vocab_size
        if requests.grammar[slot] < 0:
            fine = is_allowed(grammars.words, requests.rules[slot], candidate)
        else:
            stops = False
            for k in range(STOP_IDS):
                stops = stops or (counts and requests.entry[slot, WORD_STOP_IDS + k] == candidate)
            fine = follow(grammars, requests.grammar[slot], position, candidate, stops, most) >= 0
        if fine:
            return candidate
    return token


def make_state(
    limits: Limits, buckets: Sequence[tuple[int, int]] = (), *, checked: bool = False, tokens: TokenBytes | None = None
) -> kinds.State:
    """Allocate all of the scheduler's memory, with every page free.

    buckets: (tokens, rows) of Buckets; default_buckets(limits) if empty.
    checked: allocate a fault word, so that compiled code checks every expect.
    tokens: the bytes of the vocabulary's tokens; needed for grammars.

    Raises ConfigError for buckets that are not ascending, or do not end with the largest batch.
    """
    shapes = list(buckets) or default_buckets(limits)
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(shapes)):
        raise ConfigError(f"buckets must be ascending in tokens and rows: {shapes}")
    if shapes[-1] != (limits.tokens, limits.rows) or min(min(shape) for shape in shapes) < 1:
        raise ConfigError(f"the last bucket must be the largest batch, {(limits.tokens, limits.rows)}, not {shapes[-1]}")
    Q, S, N, B, T, K = limits.pairs, limits.slots, limits.pages, limits.rows, limits.tokens, limits.pages_per_sequence
    requests = _arrays(
        kinds.Requests,
        (S,),
        none=("page_table", "canonical", "grammar", "rules", "snapshot_source", "snapshot_target"),
        entry=(S, SQ_ENTRY_WORDS),
        tokens=(S, limits.max_model_len),
        page_table=(S, K),
        page_hash=(S, K),
        draft_states=(S, kinds.DRAFT_PLACES if limits.draft_tokens and limits.grammar_share else 1),
    )
    requests.pair[:] = np.repeat(np.arange(Q), limits.slots_per_pair)
    pages = _arrays(
        kinds.Pages,
        (N,),
        none=("ring", "ring_position", "bucket_head", "bucket_next", "bucket_previous", "key", "parent"),
        ring=(limits.ring_entries,),
        bucket_head=(limits.index_buckets,),
        tokens=(N, limits.page_size),
    )
    pages.free[:] = np.arange(N - 1, -1, -1)  # page 0 is allocated first
    batch = _arrays(
        kinds.Batch,
        (B,),
        none=("cache_slots", "token_rows", "row_slots", "drafted"),
        token_ids=(T,),
        positions=(T,),
        cache_slots=(T,),
        token_rows=(T,),
        query_starts=(B + 1,),
        logprobs=(B, LOGPROB_ENTRIES),
        counts=(kinds.BATCH_COUNTS,),
        drafted=(B, max(1, limits.step_drafts)),
    )
    kept_tokens, kept_rows = (T, B) if limits.step_groups > 1 else (1, 1)
    suspended = _arrays(
        kinds.Suspended,
        (kept_tokens,),
        row_slots=(kept_rows,),
        query_starts=(kept_rows + 1,),
        context_lengths=(kept_rows,),
        emits=(kept_rows,),
        counts=(kinds.BATCH_COUNTS,),
    )
    slots = max(1, Q * limits.grammar_share)
    grammars = _arrays(
        kinds.Grammars,
        (slots,),
        words=(slots, max(1, limits.grammar_words)),
        token_place=(limits.vocab_size if limits.grammar_share else 1, 2),
        token_bytes=(max(1, limits.token_words),),
    )
    if tokens is not None and limits.grammar_share:
        grammars.token_place[:], grammars.token_bytes[:] = tokens
    items = max(S, B, K, limits.index_items, limits.grammar_share)
    recorder = _arrays(kinds.Recorder, (8,), words=(limits.record_words,), seen=(5 * Q + 48,))
    counts = np.zeros(kinds.COUNTS, np.int64)
    counts[kinds.FREE_COUNT] = N
    return kinds.State(
        requests=requests,
        pages=pages,
        snapshots=_make_snapshots(limits),
        grammars=grammars,
        drafts=_make_drafts(limits),
        tenants=_arrays(kinds.Tenants, (S,), none=("key", "service"), clock=(1,)),
        pairs=_arrays(kinds.Pairs, (Q,)),
        inbox=_arrays(kinds.Inbox, (Q,), now_ns=(1,), command=(1,), cancel=(S,)),
        forecast=_arrays(kinds.Forecast, (1,), rows=(B, kinds.FORECAST_WORDS), published=(Q,)),
        batch=batch,
        suspended=suspended,
        buckets=kinds.Buckets(np.array([t for t, _ in shapes], np.int32), np.array([r for _, r in shapes], np.int32)),
        recorder=recorder,
        scratch=_arrays(kinds.Scratch, (items,), total=(Q,), entry=(SQ_ENTRY_WORDS,)),
        running=np.zeros(B, np.int32),
        waiting=np.zeros(S, np.int32),
        finishing=np.zeros(S, np.int32),
        counts=counts,
        counters=np.zeros(len(COUNTER_NAMES), np.int64),
        pace=np.zeros(kinds.PACE_WORDS, np.int64),
        fault=np.zeros(1, np.int64) if checked else kinds.NoFaultWord(),
    )


def _make_snapshots(limits: Limits) -> kinds.Snapshots:
    pages = limits.pages if limits.snapshots else 1
    snapshots: kinds.Snapshots = _arrays(kinds.Snapshots, (max(1, limits.snapshots),), none=("page", "of_page"), of_page=(pages,))
    return snapshots


def _make_drafts(limits: Limits) -> kinds.Drafts:
    drafts: kinds.Drafts
    slots, index = limits.slots if limits.draft_tokens else 1, {"heads": (1, 1), "links": (1, 1)}
    if limits.draft_tokens and not limits.step_drafts:
        index = {"heads": (limits.slots, limits.draft_buckets), "links": (limits.slots, limits.max_model_len)}
    drafts = _arrays(kinds.Drafts, (slots,), none=("source",), **index)
    return drafts


def _arrays(kind: Any, shape: tuple[int, ...], *, none: Sequence[str] = (), **shapes: tuple[int, ...]) -> Any:
    """The arrays of a NamedTuple, with the dtypes of its annotations, and with `shape` or the shape given in
    `shapes`. Filled with 0, or -1 for the arrays named in `none`.
    """
    return kind(*(np.full(shapes.get(name, shape), -1 if name in none else 0, dtype) for name, dtype in _dtypes(kind).items()))


@cache
def _dtypes(kind: Any) -> dict[str, Any]:
    """The dtypes of a NamedTuple's arrays, from its annotations."""
    return {name: np.int32 if hint == kinds.Int32 else np.int64 for name, hint in get_type_hints(kind).items()}


def snapshot(state: kinds.State) -> dict[str, NDArray[Any]]:
    """Copies of all arrays except scratch memory. They must not depend on how schedule() was executed."""
    return {name: np.array(array) for name, array in named_arrays(state) if not name.startswith("scratch.")}


def differences(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> list[str]:
    """The differences of two snapshots, one line per array: its name, the first index and both values."""
    lines = []
    for name in a:
        where = np.argwhere(a[name] != b[name])
        if len(where):
            index = tuple(int(i) for i in where[0])
            lines.append(f"{name}{list(index)}: {a[name][index]} != {b[name][index]} ({len(where)} differ)")
    return lines
