"""The scheduler's bounds and the shapes of its memory at random sizes, compared with a separate computation."""

import math
from contextlib import nullcontext
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import case_sizes

from blinkpy.config import MOST_GROUPS, ConfigError
from blinkpy.device.tables import named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import MAX_ROWS, MOST_SHARE, Limits, default_buckets, groups_of_step, make_limits_by_name
from blinkpy.kv.state import NoFaultWord
from blinkpy.kv.state_memory import make_state
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.byte_automaton import CELLS_WORD
from blinkpy.queues.words import LOGPROB_ENTRIES
from blinkpy.verify.sim.grammar_supply import GRAMMAR_WORDS


def limits_of(**sizes: Any) -> Limits:
    queue, facts, options = case_sizes(**sizes)
    return make_limits_by_name(queue, facts, **options)


def power_of_two(least: int) -> int:
    return next(1 << k for k in count() if 1 << k >= least)


def random_sizes(rng: np.random.Generator) -> dict[str, int]:
    sizes = {"pairs": 5, "slots": 70, "rows": 9, "tokens": 300, "pages": 200, "max_model_len": 90, "intake_entries": 9}
    drawn = {name: int(rng.integers(1, most)) for name, most in sizes.items()} | {"intake_tokens": int(rng.integers(1, 300))}
    drawn |= {"lease_ms": int(rng.integers(1, 3000))}
    drawn |= {"page_size": 1 << int(rng.integers(6)), "cq_entries": 1 << int(rng.integers(1, 9))}
    if rng.integers(2):
        drawn |= {"share": int(rng.integers(1, 90)), "token_words": int(rng.integers(1, 99))}
    return drawn | {"tokens": drawn["rows"] + drawn["tokens"], "max_model_len": 1 + drawn["max_model_len"]}


def test_what_follows_from_the_sizes(rng: np.random.Generator) -> None:
    for smallest in [{"pages": 1}] + [{}] * 200:
        sizes = random_sizes(rng) | smallest
        mixed, burst, turns = 2 * sizes["rows"], 3 * sizes["rows"], int(rng.integers(1, 3000))
        steps = {"mixed_step_tokens": mixed, "burst_step_tokens": burst} if burst <= sizes["tokens"] else {}
        others = {"prefix_caching": False, "burst_tokens": 77, "record_turns": turns, "tpot_target_ms": 40}
        a, b = limits_of(**sizes), limits_of(**sizes, **steps, **others)
        assert {name: getattr(a, name) for name in sizes.keys() & set(Limits._fields)} == {
            name: value for name, value in sizes.items() if name in Limits._fields and name != "slots"
        } | {"slots": sizes["pairs"] * sizes["slots"]}
        lease_ns = sizes["lease_ms"] * 1_000_000
        assert (a.slots_per_pair, a.lease_ns, a.vocab_size) == (sizes["slots"], lease_ns, 50)
        assert a.claim_ns == min(lease_ns // 8, 100_000_000)
        assert (a.pace_ns, b.pace_ns) == (0, 38_750_000)  # of 40 ms, a 32nd is for transport
        assert (1 << a.page_shift, 1 << a.cq_shift) == (a.page_size, a.cq_entries)
        assert (a.pages_per_sequence - 1) * a.page_size < a.max_model_len <= a.pages_per_sequence * a.page_size
        assert a.index_items == a.tokens // a.page_size + a.rows  # each row may also fill a page that it has started
        assert (a.index_buckets, a.ring_entries) == (power_of_two(a.pages), power_of_two(4 * a.pages))
        assert (a.prefix_caching, a.record_turns, a.record_words) == (1, 0, 1)
        assert (a.grammar_share, a.grammar_words) == ((sizes["share"], GRAMMAR_WORDS) if "share" in sizes else (0, 0))
        assert (a.mixed_tokens, a.burst_step_tokens, a.burst_tokens) == (a.tokens, a.tokens, 2 * a.tokens)
        assert (b.prefix_caching, b.record_turns, b.burst_tokens) == (0, turns, 77)
        assert (b.mixed_tokens, b.burst_step_tokens) == ((mixed, burst) if steps else (a.tokens, a.tokens))
        assert b.record_words == record_words(b)


def test_class_limits_have_defaults(rng: np.random.Generator) -> None:
    """The prompt tokens of latency-sensitive requests default to those of a mixed step."""
    rows, tokens, pages = int(rng.integers(1, 9)), 300, int(rng.integers(8, 200))
    mixed, given = 2 * rows + int(rng.integers(1, 99)), 2 * rows + 100 + int(rng.integers(1, 99))
    sizes = {"rows": rows, "tokens": tokens, "pages": pages}
    found = [
        limits_of(**sizes, mixed_step_tokens=a, sensitive_step_tokens=b, best_effort_step_tokens=c, best_effort_pages=d)
        for a, b, c, d in ((0, 0, 0, 1.0), (mixed, 0, 0, 0.5), (mixed, given, given, 1e-9), (0, given, 2 * rows, 1.0))
    ]
    assert [limits.sensitive_step_tokens for limits in found] == [tokens, mixed, given, given]
    assert [limits.best_effort_step_tokens for limits in found] == [tokens, tokens, given, 2 * rows]
    assert [limits.best_effort_pages for limits in found] == [pages, pages // 2, 1, pages]
    assert [limits.mixed_tokens for limits in found] == [tokens, mixed, mixed, tokens]


def test_a_turn_of_many_rows_takes_more_entries_in() -> None:
    """A fourth of the rows by default: while a step of thousands of sequences runs, more requests arrive."""
    rows = (1, 255, 259, 260, 2000, MAX_ROWS)
    assert [limits_of(rows=n, tokens=MAX_ROWS, intake_entries=0).intake_entries for n in rows] == [64, 64, 64, 65, 500, 1024]


def test_a_step_has_groups_in_proportion_to_its_bucket() -> None:
    """Rounded up, so no group takes longer than a group of the largest step."""
    for most in (1, 7, 64, 2048):
        for groups in (1, 2, 3, MOST_GROUPS):
            for bucket in {1, 2, most // 3 + 1, most // 2, most // 2 + 1, most - 1, most} - {0}:
                assert groups_of_step(groups, bucket, most) == math.ceil(Fraction(groups * bucket, most))


def record_words(limits: Limits) -> int:
    """The words of the recorder's ring."""
    longest = limits.max_model_len + 2 * limits.grammar_words
    prompts = limits.intake_tokens + longest  # (tokens, words): the last may pass the bound
    prompts = min(prompts, limits.intake_entries * longest)
    decoding = 8 + 4 * limits.pairs + (2 + limits.step_drafts) * limits.rows
    entries = limits.intake_entries * S.RECORD_ENTRY
    most = decoding + entries + prompts // 2 + prompts // limits.page_size + limits.slots + 2
    return power_of_two(max(limits.record_turns * decoding, 2 * most))


def test_the_recorders_ring_grows_at_the_word() -> None:
    """Powers of two hide errors unless a further token needs the next power: by tokens, by entries, and by turns."""
    for pages, share in ((32, 0), (16, 2)):
        sizes = {"page_size": pages, "max_model_len": 700, "rows": 3, "share": share, "token_words": share}
        for name, values, others in (
            ("intake_tokens", range(600, 3000), {"intake_entries": 20, "record_turns": 1}),
            ("intake_entries", range(1, 40), {"intake_tokens": 1 << 20, "record_turns": 1}),
            ("record_turns", range(1, 600), {}),
            ("speculative_tokens", range(1, 32), {"record_turns": 500, "speculative": "mtp"}),
        ):
            made = [limits_of(**sizes, **others, **{name: value}) for value in values]
            assert [limits.record_words for limits in made] == [record_words(limits) for limits in made]
            assert len({limits.record_words for limits in made}) > 1


def test_default_buckets(rng: np.random.Generator) -> None:
    for rows, tokens in ((1, 1), (1, 2), (4, 16), (4, 24), (4, 25), *((r, r + int(rng.integers(900))) for r in range(1, 60))):
        shapes = default_buckets(limits_of(rows=rows, tokens=tokens, mixed_step_tokens=2 * rows if 2 * rows <= tokens else 0))
        middle = {n for n in range(24, tokens) if n % 3 == 0 and (n // 3).bit_count() == 1}
        sizes = sorted(middle | {n for n in range(1, tokens) if n.bit_count() == 1} | {tokens})
        assert shapes == [(n, min(n, rows)) for n in sizes]
        assert make_state(limits_of(rows=rows, tokens=tokens)).buckets.tokens.tolist() == sizes


BOUNDS: list[tuple[str, list[int], list[int], dict[str, int]]] = [
    ("rows", [1, MAX_ROWS], [0, MAX_ROWS + 1], {"tokens": 2 * MAX_ROWS}),
    ("page_size", [1, 2, 32], [0, -1, 3, 6, 12], {}),
    ("pages", [1, 2], [0, -1], {}),
    ("max_model_len", [2, 3], [1, 0], {}),
    ("intake_entries", [0, 1, 2], [-1], {}),
    ("intake_tokens", [1, 2], [0, -1], {}),
    ("tokens", [4, 5], [3], {}),
    ("share", [1, MOST_SHARE], [-1, 0, MOST_SHARE + 1], {"share": 1, "token_words": 1}),
    ("share", [0], [-1, 1], {}),
    ("token_words", [1, 2], [0], {"share": 1, "token_words": 1}),
    ("token_words", [0], [1], {}),
    ("grammar_words", [CELLS_WORD + 1], [0, CELLS_WORD], {"share": 1, "token_words": 1}),
    ("grammar_words", [0, CELLS_WORD], [CELLS_WORD + 1], {}),
]


def test_each_bound_at_its_edges() -> None:
    options = {"rows": "max_num_seqs", "pages": "num_pages", "tokens": "max_num_batched_tokens"}
    places = {"rows": "max_num_seqs", "page_size": "page_size", "pages": "num_pages", "max_model_len": "max_model_len"}
    places |= {"share": "grammar_share", "grammar_words": "grammar_words"}
    for name, fine, wrong, more in BOUNDS:
        queue, facts, given = case_sizes(**more)
        named = "grammar" if "share" in name or "words" in name else options.get(name, name)  # in the message
        for value in (*fine, *wrong):
            its_facts = facts._replace(**{places[name]: value}) if name in places else facts
            its_options = given if name in places else given | {options.get(name, name): value}
            try:
                make_limits_by_name(queue, its_facts, **its_options)
                reported = ""
            except ConfigError as error:
                reported = str(error)
            assert bool(reported) == (value in wrong) and (not reported or named in reported), f"{name} {value}: {reported!r}"


@pytest.mark.parametrize("wrong", [[(4, 2), (4, 4)], [(8, 4), (4, 4)], [(4, 4), (8, 2)], [(0, 1)], [(4, 0)]])
def test_buckets_ascend_to_the_largest_batch(wrong: list[tuple[int, int]]) -> None:
    make_state(limits_of(), [(4, 4), (16, 4)])
    for buckets in ([*wrong, (16, 4)], [(4, 4)]):
        with pytest.raises(ConfigError, match="bucket"):
            make_state(limits_of(), buckets)


def test_rows_of_buckets_ascend_too_and_one_share_of_a_slot_is_one() -> None:
    """A bucket with more tokens but fewer rows than the previous bucket; memory for grammars of one slot, or of no slot."""
    for first, second, fine in (((4, 2), (8, 2), True), ((4, 2), (8, 1), False), ((4, 1), (4, 2), False)):
        with nullcontext() if fine else pytest.raises(ConfigError, match="buckets must be ascending in tokens and rows"):
            make_state(limits_of(), [first, second, (16, 4)])
    for share in (0, 1):
        state = make_state(limits_of(pairs=1, share=share, token_words=share))
        assert {len(words) for words in (state.grammars.words, state.grammars.epoch, state.grammars.digest)} == {1}


def test_shapes_and_contents_of_an_empty_state(rng: np.random.Generator) -> None:
    limits = limits_of(**random_sizes(rng))._replace(step_groups=int(rng.integers(1, 3)), draft_tokens=int(rng.integers(0, 3)))
    limits = limits._replace(step_drafts=limits.draft_tokens * int(rng.integers(0, 2)))
    limits = limits._replace(snapshots=int(rng.integers(0, 4)))
    Q, R, N, B, T = limits.pairs, limits.slots, limits.pages, limits.rows, limits.tokens
    K, P, length = limits.pages_per_sequence, limits.page_size, limits.max_model_len
    share, G, V = limits.grammar_share, max(1, Q * limits.grammar_share), limits.vocab_size if limits.grammar_share else 1
    items = max(R, B, K, limits.index_items, share)
    usual = {"requests": (R,), "pages": (N,), "pairs": (Q,), "inbox": (Q,), "batch": (B,), "recorder": (8,), "scratch": (items,)}
    kept = (T, B) if limits.step_groups > 1 else (1, 1)
    drafted, indexed = R if limits.draft_tokens else 1, limits.draft_tokens > limits.step_drafts
    heads, links = ((R, limits.draft_buckets), (R, length)) if indexed else ((1, 1), (1, 1))
    usual |= {
        "drafts": (drafted,),
        "grammars": (G,),
        "tenants": (R,),
        "suspended": (kept[1],),
        "snapshots": (max(1, limits.snapshots),),
    }
    # fmt: off
    own = {
        "requests.entry": (R, 64), "requests.tokens": (R, length), "requests.page_table": (R, K), "requests.page_hash": (R, K),
        "requests.draft_states": (R, S.DRAFT_PLACES if limits.draft_tokens and share else 1),
        "pages.ring": (limits.ring_entries,), "pages.bucket_head": (limits.index_buckets,), "pages.tokens": (N, P),
        "grammars.words": (G, GRAMMAR_WORDS if share else 1), "grammars.token_place": (V, 2),
        "grammars.token_bytes": (max(1, limits.token_words),),
        "inbox.now_ns": (1,), "inbox.command": (1,), "inbox.cancel": (R,),
        **{f"batch.{name}": (T,) for name in ("token_ids", "positions", "cache_slots", "token_rows")},
        "batch.query_starts": (B + 1,), "batch.logprobs": (B, LOGPROB_ENTRIES), "batch.counts": (8,),
        "batch.drafted": (B, max(1, limits.step_drafts)),
        **{f"suspended.{name}": (kept[0],) for name in ("token_ids", "positions", "cache_slots", "token_rows")},
        "suspended.query_starts": (kept[1] + 1,), "suspended.counts": (8,),
        "forecast.rows": (B, S.FORECAST_WORDS), "forecast.published": (Q,), "forecast.max_context": (1,),
        "forecast.unpublished": (1,), "forecast.scores": (1,),
        "recorder.words": (limits.record_words,), "recorder.seen": (5 * Q + 48,),
        "scratch.total": (Q,), "scratch.entry": (64,), "running": (B,), "waiting": (R,), "finishing": (R,), "counts": (S.COUNTS,),
        "drafts.heads": heads, "drafts.links": links,
        "snapshots.of_page": (N if limits.snapshots else 1,),
        "pace": (S.PACE_WORDS,), "tenants.clock": (1,),
    }
    # fmt: on
    none = {
        "requests": "page_table canonical grammar rules snapshot_source snapshot_target",
        "snapshots": "page of_page",
        "batch": "cache_slots token_rows row_slots drafted",
        "drafts": "source",
    }
    none["tenants"], none["pages"] = "key service", "ring ring_position bucket_head bucket_next bucket_previous key parent"
    state = make_state(limits)
    assert isinstance(state.fault, NoFaultWord)
    assert make_state(limits, checked=True).fault.tolist() == [0]
    for name, array in named_arrays(state):
        group, _, field = name.rpartition(".")
        if group != "buckets" and name != "counters":
            assert array.shape == own.get(name, usual.get(group)), name
        if name not in ("requests.pair", "pages.free", "counts", "buckets.tokens", "buckets.rows"):
            assert (array == (-1 if field in none.get(group, "").split() else 0)).all(), name
    assert state.requests.pair.tolist() == [slot // limits.slots_per_pair for slot in range(R)]
    assert state.pages.free.tolist() == list(range(N))[::-1]
    assert {i: n for i, n in enumerate(state.counts.tolist()) if n} == {S.FREE_COUNT: N}


def test_a_state_has_the_tokens_bytes_where_there_are_grammars() -> None:
    pieces = TokenBytes.of([b"ab", b"abcde"], 50)
    for share in (0, 2):
        queue, facts, options = case_sizes(share=share, token_words=len(pieces.words) if share else 0)
        limits = make_limits_by_name(queue, facts._replace(grammar_words=GRAMMAR_WORDS if share else CELLS_WORD), **options)
        grammars = make_state(limits, tokens=pieces).grammars
        kept = TokenBytes(grammars.token_place, grammars.token_bytes).pieces()
        assert kept == ([b"ab", b"abcde", *[b""] * 48] if share else [b""])


def test_groups_of_a_step_are_few_and_their_bounds_not_negative() -> None:
    limits = limits_of(step_groups=MOST_GROUPS, cut_step_tokens=0, suspend_steps=0)
    assert (limits.step_groups, limits.cut_tokens, limits.suspend_steps) == (MOST_GROUPS, 0, 0)
    for wrong in ({"step_groups": 0}, {"step_groups": MOST_GROUPS + 1}, {"cut_step_tokens": -1}, {"suspend_steps": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            limits_of(**wrong)
    assert limits_of().step_groups == 1


def test_targets_of_the_classes_are_in_order() -> None:
    assert limits_of(tpot_target_ms=40, flex_tpot_target_ms=40).best_effort_pace_ns == limits_of(tpot_target_ms=40).pace_ns
    with pytest.raises(ConfigError, match=r"flex_tpot_target_ms \(39\) must be at least tpot_target_ms \(40\)"):
        limits_of(tpot_target_ms=40, flex_tpot_target_ms=39)


@pytest.mark.parametrize("words", [0, 1, 2])
def test_tokens_have_as_many_words_as_their_bytes_take(words: int) -> None:
    """At least one word, because empty memory has no address."""
    state = make_state(limits_of(share=1 if words else 0, token_words=words))
    assert state.grammars.token_bytes.shape == (max(1, words),)
