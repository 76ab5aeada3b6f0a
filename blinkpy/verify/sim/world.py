"""The state of a simulation without the scheduler: front ends, submissions, and expected outputs.

All state is integer arrays, so that compiled code and plain Python share memory. Q pairs, L slots per
pair, S = Q * L slots, K pages and C tokens in the longest sequence, W writes on a front end's wire.
"""

import dataclasses
import random
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from blinkpy.kv.limits import Limits, make_limits_by_name, takes_predictions
from blinkpy.kv.state import Int32, Int64, State
from blinkpy.kv.state_memory import make_state
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.layout import EngineFacts, EngineViews, QueueLayout, QueueSizes, engine_views, write_header
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETERS
from blinkpy.queues.submission import CHECKS, SQ_ENTRY_WORDS, neutral_entries, order_key
from blinkpy.verify.sim.grammar_supply import (
    ALPHABET,
    DEAD_SHARE,
    GRAMMAR_WORDS,
    GrammarSupply,
    RuleSupply,
    random_pieces,
    random_rules,
    random_supply,
)
from blinkpy.verify.sim.synthetic_model import LOG, LOG_WORDS

WIRE = 128  # maximum undelivered writes of a front end; a power of two
STEMS = 3  # number of token sequences with which prompts begin, so that prefixes are shared
TICK_NS = 50_000
PACES_NS = (*[0] * 8, TICK_NS - 1, 2 * TICK_NS, TICK_NS * 13 // 5, 4 * TICK_NS)  # a step takes one tick, but in uneven worlds
UNEVEN_PACES_NS = (2 * TICK_NS, 3 * TICK_NS, 5 * TICK_NS, 8 * TICK_NS)
FEW_PAGES = 24
MORE_ROWS = 3  # further rows of a world with drafts
PREDICTING = 0.7  # share of worlds with drafts but no draft layer in which requests may have predictions
LASTING = 8  # one in this many worlds with drafts has long outputs with a grammar
FEW_DEAD = 0.05  # see grammar_supply.DEAD_SHARE
HONEST, HOSTILE, HOSTILE_WITHOUT_HASHES = range(3)  # Sim.hostile: kind of the last front end; the third kind shares no page
GARBAGE_CLAIMS, GARBAGE_ENTRIES = range(2)  # Sim.garbage: claims by a hostile front end, and its consumed entries
WorldSizes = tuple[QueueSizes, EngineFacts, dict[str, Any]]  # the third: options of make_limits_by_name


class Odds(NamedTuple):
    """Probability of each event per round of a front end, in thousandths. Annotated: the values from which a seed chooses."""

    submit: Annotated[int, 20, 200, 600]
    repeat: Annotated[int, 0, 1000]  # share of requests whose whole prompt is shared; 0 if pages are few
    answer: Annotated[int, 1, 12]  # max_tokens of most requests
    burst: Annotated[int, 1, 3, 100]  # maximum number of requests in one round
    cancel: Annotated[int, 0, 10, 100]
    crash: Annotated[int, 0, 2, 20]
    comeback: Annotated[int, 50, 300]  # a crashed front end returns
    silent: Annotated[int, 0, 0, 5]  # a front end pauses, like a process under SIGSTOP
    late: Annotated[int, 0, 20, 100]  # a write from an earlier epoch lands
    broken: Annotated[int, 0, 0, 3]  # an impossible doorbell or completion head
    bad: Annotated[int, 0, 30, 200]  # share of entries that the engine must refuse
    pace: Annotated[int, 0, 4, 30]  # a reader becomes slow, gets stuck, or is fast again
    delay: Annotated[int, 0, 100, 500]  # writes are delayed
    notice: Annotated[int, 100, 1000]  # a front end checks whether its queue pair was revoked
    jump: Annotated[int, 0, 0, 2]  # per round of the world: time passes without heartbeats
    poison: Annotated[int, 0, 0, 20]  # per round of the world: the model yields an invalid token


CHOICES = {name: hint.__metadata__ for name, hint in get_type_hints(Odds, include_extras=True).items()}


class Fronts(NamedTuple):
    """The front ends' private state. Fields without a shape are [S], one per slot's request; request_id 0: a free slot."""

    alive: Int64  # [Q]
    silent: Int64  # [Q] turns until the front end continues
    pace: Int64  # [Q] speed of its reader: FAST, SLOW or STUCK
    epoch: Int64  # [Q] 0: no pair
    claim: Int64  # [Q] claimed epoch
    counter: Int64  # [Q] requests of this epoch
    beat: Int64  # [Q]
    sq_tail: Int64  # [Q]
    cq_head: Int64  # [Q]
    broke: Int64  # [Q] 1: it broke the protocol, so the engine may revoke it
    request_id: Int64
    cache_salt: Int64
    seed: Int64
    prompt_length: Int64
    expected: Int64  # number of expected tokens
    finish: Int64  # expected end: FINISH_*, and REJECT_* << 8 for a bad entry
    got: Int64  # tokens so far
    cancelled: Int64
    logprobs: Int64  # requested number; -1: not requested
    poisoned: Int64  # 1: the model failed for this request
    grammar: Int64  # index of Sim.grammars, -1: none
    rules: Int64  # index of Sim.rules, -1: none
    scored: Int64  # scored prompt tokens that precede the generated tokens
    predicted: Int64  # tokens of its prediction
    prediction: Int32  # [S, C]
    tokens: Int32  # [S, C] prompt, then the expected output
    page_hash: Int64  # [S, K]
    entry: Int32  # [Q, sq_entries, 64] entries as submitted
    wire_kind: Int64  # [Q, W]
    wire_index: Int64  # [Q, W]
    wire_value: Int64  # [Q, W]
    wire_head: Int64  # [Q] delivered
    wire_tail: Int64  # [Q]


class Observed(NamedTuple):
    """The state after the last turn, against which the next turn is judged."""

    status: Int64  # [S]
    request_id: Int64  # [S]
    cancel_age: Int64  # [S] turns since a cancel became visible
    generated: Int64  # [S] generated tokens of a running request
    first_ns: Int64  # [S] time of the first generated token
    step: Int64  # [3] rows that the next turn commits, end of the last step in ns, 1 within a cut step
    attached: Int64  # [Q]
    epoch: Int64  # [Q]
    sq_head: Int64  # [Q]
    cq_tail: Int64  # [Q]
    passed: Int64  # [Q] entries of other pairs consumed while this pair had one
    beat: Int64  # [Q] heartbeat word
    beat_ns: Int64  # [Q] time of the heartbeat's last change
    granted_ns: Int64  # [Q] time of the epoch's grant
    best: Int64  # [3] request with the lowest rank: id, progress, turns without progress


class Sim(NamedTuple):
    seed: int
    turns: int  # turns of the storm; the calm follows
    check_every: int  # turns between two checks of the state
    progress_bound: int  # maximum turns without progress of the request with the lowest rank
    hostile: int
    predictions: int  # 1: requests may have predictions
    odds: Odds
    fronts: Fronts
    observed: Observed
    stems: Int32  # [STEMS, C]
    cache: Int64  # [N * P] the model's keys and values
    states: Int64  # [S] the recurrent state of each slot: the number of its last computed token
    drafted: Int64  # [S, D] numbers of the drafts that follow each state
    held: Int64  # [S] tokens that each state includes
    snapshots: Int64  # [M] snapshots of recurrent states
    muted: Int32  # [turns, Q + 1] 1: no random action of this actor in this turn; the last actor is the world
    draws: Int64  # [1]
    clock: Int64  # [1] ns
    step_ns: Int64  # [2] duration of a step beyond one tick: per token of its batch, and maximum jitter
    poison: Int64  # [1] row of the next batch that gets an invalid token, or -1
    flight: Int64  # [2] next group of a cut step, or 0, and a checksum of its input
    references: Int64  # [max(S, N)] scratch
    seen: Int64  # [max(S, N)] scratch
    entry: Int32  # [64] scratch
    grammars: GrammarSupply
    rules: RuleSupply
    good: Int32  # [GOOD_ENTRIES, 64] entries with neutral, lowest and highest parameters
    bad: Int32  # [BAD_WORDS, 2] index of an entry's word, and an invalid value for it
    log: Int64  # [LOG, LOG_WORDS]
    logged: Int64  # [1]
    garbage: Int64  # [2]


class World(NamedTuple):
    """A scheduler, its queues and a simulation; sizes and options depend on a seed."""

    limits: Limits
    state: State
    queues: EngineViews
    sim: Sim
    segment: memoryview


def random_limits(draw: random.Random, tight: bool, more_rows: int = 0) -> WorldSizes:
    """Small sizes, so that every resource runs out often. tight: see make_world. more_rows: further rows for drafts."""
    rows, page_size = draw.randint(1, 6) + more_rows, draw.choice((1, 2, 4, 8))
    pages = draw.randint(3, FEW_PAGES) if draw.random() < 0.8 else draw.randint(FEW_PAGES + 1, 80)
    pairs, slots, context = draw.randint(1, 5), draw.randint(1, 6), draw.randint(8, 48)
    sq_entries = max(2, 1 << (slots - 1).bit_length())
    share = draw.choice((0, 1, 2, 4))
    per_entry = (context + (2 * GRAMMAR_WORDS if share else 0), context // page_size + 1)  # tokens with grammar and rules, hashes
    arenas = [n + draw.randint(0, n) if tight else sq_entries * n for n in per_entry]
    sizes = QueueSizes(
        pairs=pairs,
        slots=slots,
        sq_entries=sq_entries,
        cq_entries=draw.choice((2, 4, 16, 64)),
        prompt_tokens=max(16, arenas[0]),
        hash_entries=arenas[1],
    )
    # Multipliers of 0 make many hashes collide.
    multipliers = draw.choice(((1_234_567, 7_654_321), (1_234_567, 7_654_321), (0, 0)))
    facts = EngineFacts(1, *multipliers, context, draw.choice((2, 2, 50, 1000)), page_size, pages, rows, lease_ms=1)
    facts = facts._replace(grammar_share=share, grammar_words=GRAMMAR_WORDS if share else 0)
    tokens = rows + draw.randint(0, 20)
    mixed = draw.randint(2 * rows, tokens) if 2 * rows <= tokens and draw.random() < 0.5 else 0
    options = {
        "max_num_batched_tokens": tokens,
        "mixed_step_tokens": mixed,
        "burst_step_tokens": (0, mixed, (mixed + tokens) // 2)[pages % 3] if mixed else 0,
        "burst_tokens": draw.choice((1, 8, 24, 0)),
        "yield_steps": (4, 1, 2, 0)[pages % 4],
        "best_effort_step_tokens": (0, 2 * rows, rows + tokens // 2)[context % 3] if 2 * rows <= tokens else 0,
        "sensitive_step_tokens": (0, 1, 3)[(rows + context) % 3] if tokens > 3 else 0,
        "best_effort_pages": (1.0, 0.5, 0.25)[tokens % 3],
        "step_groups": (1, 2, 3, 1, 5)[(pages + context) % 5],
        "cut_step_tokens": (0, 2, rows)[slots % 3],
        "suspend_steps": (4, 1, 2, 9, 0, 6)[(pages + rows) % 6],
        "prefix_caching": draw.random() < 0.85,
        "intake_entries": draw.choice((1, 4, 64)),
        "intake_tokens": draw.choice((8, 32768)),
    }
    return sizes, facts, options


def random_buckets(draw: random.Random, limits: Limits) -> list[tuple[int, int]]:
    """(tokens, rows) of random buckets; [] for the default buckets."""
    if draw.random() < 0.5:
        return []
    tokens = sorted(draw.sample(range(1, limits.tokens + 1), min(3, limits.tokens)))
    rows = sorted(draw.randint(1, limits.rows) for _ in tokens)
    return [(t, r) for t, r in zip(tokens, rows, strict=True) if t < limits.tokens] + [(limits.tokens, limits.rows)]


def random_odds(draw: random.Random, limits: Limits) -> Odds:
    """Random odds. With many pages, whole prompts may repeat, which causes cache hits."""
    few = limits.pages <= FEW_PAGES
    return Odds(**{name: 0 if name == "repeat" and few else draw.choice(values) for name, values in CHOICES.items()})


def good_entries() -> Int32:
    """The value of Sim.good."""
    entries = neutral_entries(3)
    for p in PARAMETERS:
        low, high = (np.dtype(p.dtype).type(bound) for bound in p.accepted)
        entries[p.name][1:] = np.nextafter(low, high) if p.above_low else low, high
    return entries.view(np.int32).reshape(3, SQ_ENTRY_WORDS)


def bad_words() -> list[tuple[int, int]]:
    """The value of Sim.bad: for each parameter, the values just outside its range, and NaN."""
    pairs = []
    for word, low, high, is_float in CHECKS:
        keys = {low - 1, high + 1, *((INT32_MAX, -INT32_MAX - 1) if is_float else ())}
        pairs += [(word, order_key(key) if is_float else key) for key in sorted(keys) if -INT32_MAX - 1 <= key <= INT32_MAX]
    return pairs


GOOD_ENTRIES, BAD_WORDS = len(good_entries()), len(bad_words())


def make_world(
    seed: int,
    turns: int,
    check_every: int = 1,
    tight: bool = False,
    chosen: WorldSizes | None = None,
    odds: Odds | None = None,
    checked: bool = False,
    records: bool = False,
    hostile: int = HONEST,
    dead_ends: bool = False,
) -> World:
    """Create the world of a seed.

    turns: length of the stormy part.
    check_every: turns between two checks of the state.
    tight: arenas hold little more than one prompt, instead of one prompt per ring entry.
    chosen: fixed sizes instead of random sizes, with the default buckets.
    odds: replacements for random odds.
    checked: see make_state.
    records: enable the recorder, with the smallest ring.
    hostile: HONEST, HOSTILE or HOSTILE_WITHOUT_HASHES. A hostile front end has at least one neighbor.
    dead_ends: no byte continues the last state of each automaton.
    """
    draw = random.Random(seed)
    drafts = random.Random(f"drafts {seed}")
    drafting = chosen is None and drafts.random() < 0.6
    sizes, facts, options = chosen or random_limits(draw, tight, MORE_ROWS if drafting else 0)
    if drafting:  # with few distinct tokens, outputs repeat themselves if readers are fast enough
        sizes = dataclasses.replace(sizes, cq_entries=drafts.choice((8, 16, 64)))
        facts = facts._replace(vocab_size=drafts.choice((2, 2, 2, 3)))
    if hostile:
        sizes = dataclasses.replace(sizes, pairs=max(2, sizes.pairs))
    layout = QueueLayout(sizes)
    segment = memoryview(bytearray(layout.total_bytes))
    write_header(segment, sizes, facts)
    pieces, lasting = random_pieces(draw, facts.vocab_size), drafting and seed % LASTING == 1
    if lasting:  # outputs with a grammar last long enough for drafts
        spelling = random.Random(f"spelling {seed}")
        pieces = [bytes(spelling.choices(ALPHABET, k=spelling.choice((1, 1, 2)))) for _ in pieces]
    tokens = TokenBytes.of(pieces, facts.vocab_size)
    words = len(tokens.words) if facts.grammar_share else 0
    limits = make_limits_by_name(sizes, facts, **{"record_turns": int(records), **options}, token_words=words)
    if seed % 3 == 0:
        limits = limits._replace(ring_entries=limits.index_buckets)  # the minimum, so that the ring is compacted often
    if chosen is None:
        paces = random.Random(f"pace {seed}")
        pace = paces.choice(PACES_NS)
        limits = limits._replace(pace_ns=pace, best_effort_pace_ns=max(pace, paces.choice(PACES_NS)))
    odds = odds or random_odds(draw, limits)
    if drafting:
        sizes_of_drafts = {"tokens": (1, 2, 5), "match": (2, 2, 3, 4), "rest": (0, 1, 8), "buckets": (2, 16)}
        limits = limits._replace(**{f"draft_{name}": drafts.choice(values) for name, values in sizes_of_drafts.items()})
        crowds = random.Random(f"crowd {seed}")
        limits = limits._replace(draft_requests=crowds.choice((1, 2, 4, *[limits.rows] * 7)))
        odds = odds._replace(submit=drafts.choice((40, 150, odds.submit)), answer=drafts.choice((12, 30)))
        odds = odds._replace(submit=40, answer=30, bad=0, cancel=min(10, odds.cancel)) if lasting else odds
        if drafts.random() < 0.4:
            words = 4 * limits.record_words if records else 1  # for up to 5 drafts of each row
            limits = limits._replace(step_drafts=limits.draft_tokens, draft_rest=0, record_words=words)
    snapshots = random.Random(f"snapshots {seed}")
    likely = 0.3 if drafting else 0.7  # drafting worlds also vary options that exclude snapshots
    if chosen is None and limits.prefix_caching and snapshots.random() < likely:
        distance = snapshots.choice((1, 2, 4, 16)) * limits.page_size
        limits = limits._replace(snapshots=snapshots.choice((1, 2, 3, 8)), snapshot_tokens=distance)
    stems = np.random.default_rng(seed).integers(0, limits.vocab_size, (STEMS, limits.max_model_len), np.int32)
    scratch = max(limits.slots, limits.pages)
    sim = Sim(
        seed=seed,
        turns=turns,
        check_every=check_every,
        progress_bound=(2 * limits.max_model_len + 50) * (1 + limits.yield_steps) * (limits.step_groups + limits.suspend_steps),
        hostile=hostile,
        predictions=int(takes_predictions(limits) and random.Random(f"predictions {seed}").random() < PREDICTING),
        odds=odds,
        fronts=_make_fronts(limits),
        observed=_make_observed(limits),
        stems=stems,
        cache=np.full(limits.pages * limits.page_size, -1, np.int64),
        states=np.zeros(limits.slots, np.int64),
        drafted=np.full((limits.slots, max(1, limits.draft_tokens)), -1, np.int64),
        held=np.zeros(limits.slots, np.int64),
        snapshots=np.full(max(1, limits.snapshots), -1, np.int64),
        muted=np.zeros((turns, limits.pairs + 1), np.int32),
        draws=np.zeros(1, np.int64),
        clock=np.zeros(1, np.int64),
        step_ns=np.zeros(3, np.int64),
        poison=np.full(1, -1, np.int64),
        flight=np.zeros(2, np.int64),
        references=np.zeros(scratch, np.int64),
        seen=np.zeros(scratch, np.int64),
        entry=np.zeros(SQ_ENTRY_WORDS, np.int32),
        grammars=random_supply(seed, limits.grammar_share, pieces, dead_ends, FEW_DEAD if lasting else DEAD_SHARE),
        rules=random_rules(seed, limits.vocab_size),
        good=good_entries(),
        bad=np.array(bad_words(), np.int32),
        log=np.zeros((LOG, LOG_WORDS), np.int64),
        logged=np.zeros(1, np.int64),
        garbage=np.zeros(2, np.int64),
    )
    if hostile:
        sim.fronts.broke[-1] = 1
    buckets = [] if chosen else random_buckets(draw, limits)
    state = make_state(limits, buckets, checked=checked, tokens=tokens)
    return World(limits, state, engine_views(segment, layout), sim, segment)


def _make_fronts(limits: Limits) -> Fronts:
    Q, S, K, C = limits.pairs, limits.slots, limits.pages_per_sequence, limits.max_model_len
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(Fronts._fields, (S,))
    per_pair = ("alive", "silent", "pace", "epoch", "claim", "counter", "beat", "sq_tail", "cq_head", "broke")
    shapes |= dict.fromkeys((*per_pair, "wire_head", "wire_tail"), (Q,))
    shapes |= dict.fromkeys(("wire_kind", "wire_index", "wire_value"), (Q, WIRE))
    shapes |= {"tokens": (S, C), "prediction": (S, C), "page_hash": (S, K), "entry": (Q, limits.sq_entries, SQ_ENTRY_WORDS)}
    words = ("tokens", "prediction", "entry")
    return Fronts(**{name: np.zeros(shape, np.int32 if name in words else np.int64) for name, shape in shapes.items()})


def _make_observed(limits: Limits) -> Observed:
    per_slot = ("status", "request_id", "cancel_age", "generated", "first_ns")
    sizes = {name: limits.slots if name in per_slot else limits.pairs for name in Observed._fields}
    sizes |= {"step": 3, "best": 3}
    return Observed(**{name: np.zeros(size, np.int64) for name, size in sizes.items()})


def uneven_world(seed: int, turns: int) -> World:
    """A world of make_world in which both classes have a pace.

    The duration of a step depends on its batch and has jitter, and the clock of some worlds steps back. In every second world,
    the last state of each automaton is a dead end.
    """
    draw = random.Random(f"uneven {seed}")
    world = make_world(seed, turns, dead_ends=seed % 2 == 0)
    step_ns = draw.choice((0, 1000, 4000)), draw.choice((0, TICK_NS // 2, 2 * TICK_NS))
    paces = dict(zip(("pace_ns", "best_effort_pace_ns"), sorted(draw.sample(UNEVEN_PACES_NS, 2)), strict=True))
    world.sim.step_ns[:] = *step_ns, draw.choice((0, 0, TICK_NS // 2, 5 * TICK_NS))
    return world._replace(limits=world.limits._replace(**paces))
