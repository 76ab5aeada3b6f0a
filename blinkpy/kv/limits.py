"""All limits of the scheduler, and the possible shapes of a step, as integers that are fixed at the start."""

import dataclasses
from typing import Any, NamedTuple

from blinkpy.config import (
    EAGLE,
    MOST_GROUPS,
    MTP,
    ConfigError,
    SchedulerOptions,
    check_class_sizes,
    check_drafts,
    check_step_sizes,
    check_targets,
)
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.queues.byte_automaton import CELLS_WORD
from blinkpy.queues.layout import EngineFacts, QueueSizes

MOST_SNAPSHOTS = 4096
MAX_ROWS = 4096  # counts of one queue pair are packed into 16 bits
CLAIM_NS, CLAIMS_PER_LEASE = 100_000_000, 8  # limits.claim_ns is the shorter of these times, so that successors wait briefly
PACE_MARGIN_PPM = 31_250  # margin, in millionths of the target, for longer steps and for delivery to the client
DRAFT_REST = 16
INTAKE_ENTRIES = 64  # minimum per turn
MOST_SHARE = 1 << 12  # maximum grammar slots of one queue pair


class Limits(NamedTuple):
    """All limits of the scheduler, as integers; see `make_limits`."""

    pairs: int  # Q
    slots_per_pair: int  # L
    slots: int  # S
    rows: int  # B, at most MAX_ROWS
    tokens: int  # T >= B
    mixed_tokens: int  # maximum of a step with decodes and prefill outside a burst; equal to tokens: no such limit
    burst_step_tokens: int  # maximum of a step in a burst, unless the burst's prompts are short
    burst_tokens: int  # a burst begins above this number of waiting prompt tokens
    yield_steps: int  # maximum consecutive turns in which best-effort prompts yield
    best_effort_step_tokens: int  # best-effort prompts fill a step only up to this size; equal to tokens: no such limit
    sensitive_step_tokens: int  # prompt tokens of a step while best-effort prompts yield; equal to tokens: no such limit
    best_effort_pages: int  # maximum pages of running best-effort requests, unless only one runs; N: no such limit
    step_groups: int  # layer groups of the largest step with best-effort prompts; 1: steps are never cut
    cut_tokens: int  # steps with at most this number of tokens are not cut
    suspend_steps: int  # maximum steps that interrupt one step
    page_size: int  # P, a power of two
    page_shift: int  # log2(P)
    pages: int  # N
    pages_per_sequence: int  # K
    max_model_len: int  # tokens of a sequence, prompt and output together
    vocab_size: int
    sq_entries: int  # a power of two
    cq_entries: int  # a power of two
    cq_shift: int  # log2(cq_entries)
    prompt_tokens: int  # size of a pair's prompt arena, including automata and token rules
    hash_entries: int  # size of a pair's hash arena
    hash_multiplier_1: int
    hash_multiplier_2: int
    prefix_caching: int  # 0 or 1
    lease_ns: int
    claim_ns: int  # minimum time between two grants of a queue pair
    intake_entries: int  # maximum submission entries consumed in one turn
    intake_tokens: int  # intake ends its turn after this number of prompt tokens and words of automata and token rules
    index_items: int  # maximum pages indexed in one turn
    index_buckets: int  # a power of two, >= N
    ring_entries: int  # a power of two, >= 4 N
    grammar_share: int  # slots of one pair for grammars and token rules; 0: not supported
    grammar_words: int  # of a slot
    token_words: int  # words for the bytes of all tokens
    record_turns: int  # turns that the recorder keeps, at least, if all rows decode; 0: off
    record_words: int  # words of the recorder's ring, a power of two
    pace_ns: int  # target time between tokens, for which steps wait (scheduler/pace.py); 0: no waits
    best_effort_pace_ns: int  # pace of best-effort requests; at least pace_ns
    draft_tokens: int  # maximum drafts of a request in one step; 0: no drafts
    draft_requests: int  # with more running requests, no request gets drafts
    draft_match: int  # tokens that must repeat before drafts, including the token just sampled; at least 2
    draft_rest: int  # tokens without drafts, after a step in which a request's first draft was wrong
    draft_buckets: int  # buckets of a request's index of n-grams, a power of two
    step_drafts: int  # drafts per row that a draft layer returns in a step; 0: drafts come from the request's tokens
    snapshots: int  # snapshots of recurrent states; 0: the model has no states, or prefixes are not cached
    snapshot_tokens: int  # prompt chunks end at its multiples, for snapshots; a power of two, at least page_size


def make_limits(
    sizes: QueueSizes,
    facts: EngineFacts,
    scheduler: SchedulerOptions,
    *,
    prefix_caching: bool = True,
    intake_entries: int = 0,
    intake_tokens: int = 32768,
    record_turns: int = 0,
    token_words: int = 0,
    snapshots: int = 0,
    snapshot_tokens: int = 0,
) -> Limits:
    """The scheduler's limits for a queue segment.

    scheduler: options with settled step sizes; max_num_seqs comes from `facts`.
    intake_entries: submission entries per turn; 0: enough for the rows.
    intake_tokens: prompt tokens after which the intake of a turn ends.
    record_turns: turns that the flight recorder keeps; 0: off.
    token_words: words for the bytes of all tokens, for grammars.
    snapshots: number of snapshots of recurrent states; only with prefix_caching.
    snapshot_tokens: prompt tokens between two snapshots; rounded up to a power of two, at least the page size.
    Raises ConfigError for contradictory options, with their names.
    """

    def require(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(what)

    options = dataclasses.replace(scheduler, max_num_seqs=facts.max_num_seqs)
    page, rows, tokens = facts.page_size, facts.max_num_seqs, options.max_num_batched_tokens
    require(page >= 1 and page & (page - 1) == 0, f"page_size must be a power of two, not {page}")
    require(1 <= rows <= MAX_ROWS, f"max_num_seqs must be 1 to {MAX_ROWS}, not {rows}")
    require(facts.num_pages >= 1, f"num_pages must be at least 1, not {facts.num_pages}")
    require(facts.max_model_len >= 2, f"max_model_len must be at least 2, not {facts.max_model_len}")
    slots, words = facts.grammar_share, facts.grammar_words
    require(0 <= slots <= MOST_SHARE, f"a queue pair's share of grammar_slots must be 0 to {MOST_SHARE}, not {slots}")
    require((slots > 0) == (words > CELLS_WORD) == (token_words > 0), "grammars need slots, their words, and the tokens' bytes")
    require(intake_entries >= 0 and intake_tokens >= 1, "intake_entries must not be negative, and intake_tokens at least 1")
    intake_entries = intake_entries or max(INTAKE_ENTRIES, rows // 4)  # large steps last longer
    share, groups = options.best_effort_pages, options.step_groups
    require(tokens >= 1, f"max_num_batched_tokens must be at least 1, not {tokens}")
    require(0 < share <= 1, f"best_effort_pages must be above 0 and at most 1, not {share}")
    require(1 <= groups <= MOST_GROUPS, f"step_groups must be 1 to {MOST_GROUPS}, not {groups}")
    require(min(options.cut_step_tokens, options.suspend_steps) >= 0, "cut_step_tokens and suspend_steps must not be negative")
    check_step_sizes(options)
    check_class_sizes(options)
    check_targets(options)
    check_drafts(options)
    require(0 <= snapshots <= MOST_SNAPSHOTS, f"state_snapshots must be 0 to {MOST_SNAPSHOTS}, not {snapshots}")
    require(snapshots == 0 or prefix_caching, "state_snapshots needs enable_prefix_caching")
    burst_step = options.burst_step_tokens or tokens
    step_drafts = options.draft_tokens if options.speculative in (MTP, EAGLE) else 0
    return Limits(
        pairs=sizes.pairs,
        slots_per_pair=sizes.slots,
        slots=sizes.pairs * sizes.slots,
        rows=rows,
        tokens=tokens,
        mixed_tokens=options.mixed_step_tokens or tokens,
        burst_step_tokens=burst_step,
        burst_tokens=options.burst_tokens or 2 * burst_step,
        yield_steps=options.yield_steps,
        best_effort_step_tokens=options.best_effort_step_tokens or tokens,
        sensitive_step_tokens=options.sensitive_step_tokens or options.mixed_step_tokens or tokens,
        best_effort_pages=max(1, int(share * facts.num_pages)),
        step_groups=groups,
        cut_tokens=options.cut_step_tokens,
        suspend_steps=options.suspend_steps,
        page_size=page,
        page_shift=page.bit_length() - 1,
        pages=facts.num_pages,
        pages_per_sequence=-(-facts.max_model_len // page),
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        sq_entries=sizes.sq_entries,
        cq_entries=sizes.cq_entries,
        cq_shift=sizes.cq_entries.bit_length() - 1,
        prompt_tokens=sizes.prompt_tokens,
        hash_entries=sizes.hash_entries,
        hash_multiplier_1=facts.hash_multiplier_1,
        hash_multiplier_2=facts.hash_multiplier_2,
        prefix_caching=int(prefix_caching),
        lease_ns=facts.lease_ms * 1_000_000,
        claim_ns=min(CLAIM_NS, facts.lease_ms * 1_000_000 // CLAIMS_PER_LEASE),
        intake_entries=intake_entries,
        intake_tokens=intake_tokens,
        index_items=tokens // page + rows,
        index_buckets=_power_of_two(facts.num_pages),
        ring_entries=_power_of_two(4 * facts.num_pages),
        grammar_share=facts.grammar_share,
        grammar_words=facts.grammar_words,
        token_words=token_words,
        record_turns=record_turns,
        record_words=_record_words(sizes, facts, record_turns, intake_entries, intake_tokens, step_drafts) if record_turns else 1,
        pace_ns=_pace_ns(options.tpot_target_ms),
        best_effort_pace_ns=_pace_ns(options.flex_tpot_target_ms or options.tpot_target_ms),
        draft_tokens=options.draft_tokens,
        draft_requests=min(rows, options.draft_requests or rows),
        draft_match=options.speculative_match,
        draft_rest=0 if step_drafts else DRAFT_REST,
        draft_buckets=_power_of_two(max(2, facts.max_model_len // 2)),
        step_drafts=step_drafts,
        snapshots=snapshots,
        snapshot_tokens=_power_of_two(max(snapshot_tokens, page)),
    )


def make_limits_by_name(sizes: QueueSizes, facts: EngineFacts, **options: Any) -> Limits:
    """Like make_limits, but with the scheduler's options by name, for simulations and tests."""
    names = {item.name for item in dataclasses.fields(SchedulerOptions)} & options.keys()
    return make_limits(sizes, facts, SchedulerOptions(**{name: options.pop(name) for name in names}), **options)


@device
def takes_predictions(limits):
    """Whether drafts come from tokens that a request has: its own tokens, and its prediction."""
    return limits.draft_tokens > 0 and limits.step_drafts == 0


@device
def groups_of_step(step_groups, tokens, most):
    """Number of layer groups of a step that may be cut. A smaller step has fewer groups, so that all groups
    take similar times.

    tokens: tokens of its bucket.
    most: tokens of the largest bucket.
    """
    return (step_groups * tokens + most - 1) // most


@device
def step_kind(counts):
    """The kind of a batch (STEP_KINDS), by its counts. A chunk of one token counts as a draft, because its key must be cached
    before other rows read the key.
    """
    kind = S.MIXED_STEP
    if counts[S.GROUPS] > 1:
        kind = S.CUT_STEP
    elif counts[S.DECODE_ROWS] == counts[S.ROWS]:
        kind = S.DECODE_STEP
    elif counts[S.TOKENS] == counts[S.ROWS]:
        kind = S.DRAFTED_STEP
    return kind


def _pace_ns(target_ms: float) -> int:
    return int(target_ms * (1_000_000 - PACE_MARGIN_PPM))


def _record_words(sizes: QueueSizes, facts: EngineFacts, turns: int, entries: int, tokens: int, drafts: int) -> int:
    """Words for `turns` turns that decode with all rows, and for two turns with the maximum intake."""
    fixed, rows = S.RECORD_HEADER + 4 * sizes.pairs, (2 + drafts) * facts.max_num_seqs
    longest = facts.max_model_len + 2 * facts.grammar_words  # with token rules
    taken = min(tokens + longest, entries * longest)  # prompt tokens and words of one turn
    prompts = taken // 2 + taken // facts.page_size
    largest = fixed + rows + entries * S.RECORD_ENTRY + prompts + sizes.pairs * sizes.slots + 2
    return _power_of_two(max(turns * (fixed + rows), 2 * largest))


def default_buckets(limits: Limits) -> list[tuple[int, int]]:
    """(tokens, rows) of each bucket: powers of two, with their midpoints above 16, up to the largest
    batch.
    """
    sizes, n = [], 1
    while n < limits.tokens:
        sizes.append(n)
        if n >= 16 and n + n // 2 < limits.tokens:
            sizes.append(n + n // 2)
        n *= 2
    return [(t, min(t, limits.rows)) for t in [*sizes, limits.tokens]]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
