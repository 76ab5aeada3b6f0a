"""The scheduler's state between two turns, as NamedTuples of arrays.

The same tuples hold NumPy arrays (njit), memoryviews of these (plain Python, with elements as exact integers) or arrays in GPU
memory. kv/state_memory.py allocates all memory once; kv/limits.py determines the sizes.

Symbols: Q queue pairs; L slots of a pair; S = Q * L request slots (slot = pair * L + local slot); B rows and
    T tokens of
a batch; P tokens of a page; N pages; K pages of the longest sequence.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.submission import SQ_ENTRY_WORDS, STOP_IDS
from blinkpy.queues.words import COUNTER_NAMES

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Requests.status
EMPTY, WAITING, RUNNING, FINISHING = range(4)

# State.counts
(
    RUNNING_COUNT,  # requests in `running`
    WAITING_COUNT,  # requests in the sorted part of `waiting`
    UNRANKED_COUNT,  # requests in `waiting` after the sorted part, without a rank; 0 between turns
    FINISHING_COUNT,  # requests in `finishing`
    STALLED_COUNT,  # running requests without a part in the next step (Requests.stalled is not 0)
    FREE_COUNT,  # pages on the free stack
    CACHED_COUNT,  # pages that are indexed and unreferenced
    RING_HEAD,  # eviction order: positions [RING_HEAD, RING_TAIL) of the ring
    RING_TAIL,
    ARRIVALS,  # requests accepted so far; the next arrival number
    TURNS,  # turns of the scheduler
    STEPS,  # turns that made a batch
    ROTATION,  # queue pair with which intake starts
    VERDICT_COUNT,  # queue pairs to revoke or grant in this turn
    FAST_PATH,  # 1: the turn may take the fast path, see scheduler/phases/fast_path.py
    YIELDED_TURNS,  # consecutive turns, including this one, in which best-effort prompts yield (scheduler/yielding.py)
    PASSED,  # latency-sensitive requests that overtook a better-ranked best-effort request, see scheduler/yielding.py
    INTERRUPTIONS,  # steps that interrupted the last cut step
    INTERRUPTS,  # while a step is suspended, 1: the turn plans a step that interrupts it
) = range(19)
COUNTS = 19

# Batch.counts and Suspended.counts
(
    ROWS,
    TOKENS,
    DECODE_ROWS,  # number of leading rows with one token each, without drafts
    BUCKET,  # index in Buckets
    MAX_CONTEXT,  # the greatest of context_lengths
    EMITS,  # rows whose last token yields a sampled token
    GROUPS,  # layer groups, each followed by a turn: see scheduler/suspension.py
    GROUP,  # layer group that runs next or has just run; above 0: the previous turn planned no new batch
) = range(8)
BATCH_COUNTS = 8
DRAFT = 2  # Batch.emits of a draft's row
DECODE_STEP, MIXED_STEP, CUT_STEP, DRAFTED_STEP = STEP_KINDS = range(4)
"""Kinds of a batch: only decode rows; with prefill chunks; the same in layer groups; rows of one token with drafts."""
DRAFT_PLACES = 32  # columns of Requests.draft_states, a power of two above the most drafts of a request

# Forecast.rows
(
    FORECAST_SLOT,  # request slot
    FORECAST_PAIR,  # its queue pair
    FORECAST_CQ_INDEX,  # entry of the completion ring for its word
    FORECAST_SLOT_LAP,  # part of that word: local slot | lap << FORECAST_LAP_SHIFT
    FORECAST_LENGTH,  # tokens of the request, including the sampled one
    FORECAST_CACHE_SLOT,  # page * P + offset for that token's keys and values
    FORECAST_FLAGS,  # FORECAST_IS_LAST, FORECAST_RECORD, FORECAST_GRAMMAR, FORECAST_SCORES
    FORECAST_STOPS,  # number of active stop ids
) = range(8)
FORECAST_STOP_IDS = 8
FORECAST_WORDS = FORECAST_STOP_IDS + STOP_IDS
FORECAST_LAP_SHIFT = 16
FORECAST_IS_LAST = 1  # any token ends the request
FORECAST_RECORD = 2  # the token is published with log probabilities
FORECAST_GRAMMAR = 4  # the request has a grammar
FORECAST_SCORES = 8  # the token must be the prompt's next token

# State.counters: the engine's counters, in the order of words.COUNTER_NAMES
COUNTER_INDEX = {name: i for i, name in enumerate(COUNTER_NAMES)}

REVOKE, GRANT, EXPIRED, BROKEN = 1, 2, 4, 8  # Pairs.verdict
STALLED, IN_FLIGHT = 1, 2  # values of Requests.stalled: the completion ring is full; the request is in flight in a cut step
NO_OWNER = -1  # Requests.finish: the request lost its owner, so its end is not published
FINISH_REASON_SHIFT = 8  # Requests.finish: FINISH_* | reason << 8
FINISH_CODE_MASK = 0xFF

# The recorder's ring, see scheduler/phases/recorder.py. Int64 words of a record's head, and of each entry
# without its prompt, hashes, automaton and token rules.
RECORD_HEADER, RECORD_ENTRY = 8, 6 + SQ_ENTRY_WORDS // 2
RECORD_MARK = 0x0B11
RECORDED_ENTRY, RECORDED_CANCELS = 1, 2
NOTE_SHIFT = 8

# State.pace, see scheduler/pace.py
(
    PACE_STEP_NS,  # predicted duration of the next step; at most limits.best_effort_pace_ns
    PACE_TOKEN_NS,  # when the last step's tokens arrived
    PACE_SINCE_NS,  # start of the next step's delay; 0: no delay
    PACE_DUE_NS,  # end of the delay, unless an event ends it earlier; 0: no delay
) = range(4)
PACE_WORDS = 8

# Recorder.cursor and Recorder.progress
(
    POSITION,  # words of complete records since the start
    RECORDS,  # complete records since the start
    NOTES,  # words of notes in the open record
    COMMITS,  # rows that the next turn commits
    COPIES_BEGUN,  # only in `progress`: state copies that a loop on the GPU began
    COPIES_DONE,
) = range(6)

NO_PAGE = -1
NO_SNAPSHOT = -1
CHAIN_EVICTED = -2  # Requests.canonical: the indexed chain was evicted; the running request offers no more pages

# Results of schedule() other than a bucket's index.
NO_BATCH, STOPPED, DRAINED = -1, -2, -3


class Requests(NamedTuple):
    """State of each request slot, [S] or [S, n]."""

    status: Int32  # EMPTY, WAITING, RUNNING, FINISHING
    pair: Int32  # queue pair of the slot; constant
    entry: Int32  # [S, 64] submission entry, verbatim
    request_id: Int64
    cache_salt: Int64
    tokens: Int32  # [S, max_model_len] prompt and generated tokens; the prediction is at the end of the row
    prompt_length: Int32
    length: Int32  # known tokens: prompt and generated tokens; of a scored prompt, the first token and published tokens
    computed: Int32  # tokens whose keys and values are in the cache
    page_table: Int32  # [S, K] pages of the sequence, -1 past num_pages
    num_pages: Int32
    page_hash: Int64  # [S, K] chained hash of each full page
    hashed: Int32  # pages whose hash is known
    indexed: Int32  # leading pages that are in the prefix index (these pages, or equal pages)
    canonical: Int32  # indexed page with the tokens of page indexed - 1; NO_PAGE at the root, or CHAIN_EVICTED
    canonical_generation: Int64
    rank: Int64  # the policy's rank, lower first; set when the request enters `waiting`
    arrival: Int64  # unique number of the request, in acceptance order
    arrival_us: Int64  # engine's clock
    service: Int64  # its tenant's counter at acceptance: see scheduler/tenant_service.py
    charged: Int64  # service charged to the tenant's counter
    tenant_row: Int32  # of Tenants
    first_token_ns: Int64  # time of its first generated token, if steps are paced
    finish: Int32  # FINISHING: FINISH_* | reason << 8
    stalled: Int32  # running, but without a row in the next step: STALLED or IN_FLIGHT
    preemptions: Int32
    hit_tokens: Int32  # tokens found in the prefix cache when it was last considered for admission
    grammar: Int32  # slot of its automaton in Grammars; -1: without a grammar
    grammar_state: Int64  # position in the automaton, after all generated tokens
    draft_states: Int64  # [S, DRAFT_PLACES] the same after n tokens, drafts included, at n % DRAFT_PLACES; [S, 1] without drafts
    rules: Int32  # slot of its token rules in Grammars, or -1
    snapshot_source: Int32  # snapshot that its first step copies into the slot's recurrent state; NO_SNAPSHOT
    snapshot_target: Int32  # snapshot into which the planned step copies the state; NO_SNAPSHOT
    snapshot_branch: Int32  # end of indexed pages that were found but unusable; 0: no such pages


class Pages(NamedTuple):
    """The page pool and the prefix index. A page is free (on the stack), cached (in the ring) or held (refcount > 0).

    The ring holds cached pages in order of eviction. Entry i is valid while ring_position[ring[i]] == i; a page that
    is referenced again leaves a stale entry behind.
    """

    free: Int32  # [N] stack
    refcount: Int32  # [N] page tables that have the page
    ring: Int32  # [ring_entries]
    ring_position: Int64  # [N] position of the page's ring entry, -1 unless cached
    bucket_head: Int32  # [index_buckets] newest page of each chain, -1
    bucket_next: Int32  # [N]
    bucket_previous: Int32  # [N]
    key: Int64  # [N] hash of all tokens up to the page's end; -1: not in the index
    tokens: Int32  # [N, P] of indexed pages
    salt: Int64  # [N]
    parent: Int32  # [N] the previous page in the sequence, indexed; NO_PAGE for a first page
    parent_generation: Int64  # [N] generation of the parent when the page was indexed
    generation: Int64  # [N] incremented when the page's content changes


class Snapshots(NamedTuple):
    """Snapshots of recurrent states (kv/snapshots.py). M: limits.snapshots. Without snapshots, the arrays have one element
    each."""

    page: Int32  # [M] indexed page at whose end the state was copied; NO_PAGE
    generation: Int64  # [M] generation of that page
    used: Int64  # [M] turn of its last use, plus 1
    pins: Int32  # [M] pending copies: by requests that start from it, and by the step that writes it
    of_page: Int32  # [N] latest snapshot at each page; it may now belong to another page; NO_SNAPSHOT


class Drafts(NamedTuple):
    """Drafts of each request slot, and the index of the request's tokens from which they come (scheduler/phases/drafts.py).

    H buckets, C max_model_len. Without drafts, the arrays have one element each. If the step returns the drafts
    (Limits.step_drafts), the index has one element.
    """

    source: Int32  # [S] if the next token equals the request's token at this position, the tokens after it are drafts; -1.
    # With Limits.step_drafts instead: row of the step's batch whose Batch.drafted may follow its token; -1
    most: Int32  # [S] drafts that the request may have in one step
    rests_until: Int32  # [S] length of the request below which it has no drafts
    known: Int32  # [S] first position that is not yet indexed
    predicted: Int32  # [S] the first such position of the prediction
    heads: Int32  # [S, H] latest position after an n-gram with this hash; 0: none. Entries of an earlier request are harmless.
    # The hash of an n-gram differs in a prediction
    links: Int32  # [S, C] the earlier position in the same bucket; 0: end of the chain


class Grammars(NamedTuple):
    """Automata of the requests' grammars, their token rules, and the bytes of all tokens: see kv/grammars.py.

    G slots, divided among the pairs; W words of a slot; V tokens.
    """

    epoch: Int64  # [G] epoch of the pair that sent the words; 0: the slot is empty
    digest: Int64  # [G] digest, from the front end
    used: Int64  # [G] number of the slot's last use, counting uses of all slots; 0: the slot is empty
    words: Int32  # [G, W] the packed form of byte_automaton or token_rules
    token_place: Int32  # [V, 2] token_bytes.TokenBytes
    token_bytes: Int32  # [n]


class Tenants(NamedTuple):
    """The service of tenants by class (scheduler/tenant_service.py); one row per slot."""

    key: Int64  # [S] tenant << 1 | class; -1: the row is unused
    service: Int64  # [S] the counter, in 1/TOKEN_SERVICE tokens; -1 in an unused row
    expected: Int64  # [S] expected tokens of the tenant's next output
    clock: Int64  # [1] greatest Requests.service so far


class Pairs(NamedTuple):
    """The engine's side of each queue pair, [Q]. Positions count from the segment's creation."""

    epoch: Int64  # granted epoch
    attached: Int64  # 1 while a front end is attached
    sq_head: Int64  # entries consumed
    sq_tail: Int64  # entries announced
    cq_head: Int64  # completions read
    cq_tail: Int64  # completions published
    unclaimed_entries: Int64  # during planning: free entries of the completion ring that no running request needs
    heartbeat: Int64  # last heartbeat read
    heartbeat_ns: Int64  # when the heartbeat last changed
    granted_ns: Int64  # when the epoch was granted
    verdict: Int64  # this turn's bits: REVOKE, with EXPIRED or BROKEN as the reason; GRANT
    reserved: Int64  # free entries of the completion ring that a suspended step's tokens will take


class Inbox(NamedTuple):
    """The words of other parties as last read, not yet validated."""

    now_ns: Int64  # [1] clock of the turn
    command: Int64  # [1] the host's
    heartbeat: Int64  # [Q] FRONT_HEARTBEAT, and so on
    claim: Int64  # [Q]
    cq_head: Int64  # [Q]
    doorbell: Int64  # [Q]
    cancel: Int64  # [S] cancel words, read for running and waiting requests


class Forecast(NamedTuple):
    """The outcome of the running step, except its tokens, if all its rows decode."""

    rows: Int32  # [B, FORECAST_WORDS] by row of the batch, FORECAST_*; the words of one lane are contiguous
    published: Int64  # [Q] number of the step's completions
    max_context: Int64  # [1] longest context of the next step, if no request ends
    unpublished: Int64  # [1] number of completion words that the fast path left in Scratch.word
    scores: Int64  # [1] rows of scored prompts


class Batch(NamedTuple):
    """The next step's input. Rows [0, DECODE_ROWS) have one token each; see the field comments for padding.

    Drafts are rows of one token after the row of their request, with the same slot (scheduler/phases/drafts.py).
    """

    token_ids: Int32  # [T] input tokens, row after row; padding 0
    positions: Int32  # [T] position in the sequence; padding 0
    cache_slots: Int32  # [T] page * P + offset where keys and values go; padding -1
    token_rows: Int32  # [T] row of the token; padding -1
    row_slots: Int32  # [B] request slot of the row; padding -1
    query_starts: Int32  # [B + 1] first token of each row; past the last row: number of tokens
    context_lengths: Int32  # [B] tokens in the cache after this step; padding 0
    emits: Int32  # [B] 1: the row's last token yields a sampled token; DRAFT: a draft, which also does; padding 0
    sampled: Int32  # [B] output: the sampled tokens
    logprobs: Int64  # [B, LOGPROB_ENTRIES] output, if requested: logprob_record.LOGPROB_ENTRY
    counts: Int64  # [BATCH_COUNTS] ROWS and the counts after it
    drafted: Int32  # [B, D] output with Limits.step_drafts = D: drafts after the sampled token, then -1; otherwise [B, 1]


class Suspended(NamedTuple):
    """The input of a suspended step, copied from Batch; ROWS is 0 if no step is suspended. If steps are never cut, the arrays
    have one element each.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    cache_slots: Int32  # [T]
    token_rows: Int32  # [T]
    row_slots: Int32  # [B]
    query_starts: Int32  # [B + 1]
    context_lengths: Int32  # [B]
    emits: Int32  # [B]
    counts: Int64  # [BATCH_COUNTS] GROUP: the group at which it resumes


class Buckets(NamedTuple):
    """Batch shapes with a step graph, ascending. A step uses the first shape that fits its tokens and
    rows.
    """

    tokens: Int32
    rows: Int32


class Recorder(NamedTuple):
    """The inputs and decisions of the last turns: see scheduler/phases/recorder.py."""

    words: Int64  # [record_words] ring of records; only the ring's end can split one
    progress: Int64  # [8] state after the last record, for readers
    cursor: Int64  # [8] the scheduler's copy, with the size of the open record
    seen: Int64  # [5 Q + 48] words of the last idle turn, to detect whether the next idle turn changes them


class Scratch(NamedTuple):
    """Working memory of one turn; its content is undefined afterwards. M: items of the longest list of a
    phase.
    """

    slot: Int32  # [M]
    page: Int32  # [M]
    first: Int32  # [M]
    found: Int32  # [M]
    rival: Int32  # [M]
    key: Int64  # [M]
    breaks: Int64  # [M]
    pair: Int32  # [M]
    position: Int32  # [M]
    word: Int64  # [M]
    total: Int64  # [Q]
    entry: Int32  # [SQ_ENTRY_WORDS] the entry that intake reads


class NoFaultWord(NamedTuple):
    """Replaces State.fault in an unchecked state, so that compiled code contains no fault handling."""


class State(NamedTuple):
    """The whole state. Lists hold request slots; `waiting` is sorted by (rank, arrival), other lists by time of entry."""

    requests: Requests
    pages: Pages
    snapshots: Snapshots
    grammars: Grammars
    drafts: Drafts
    tenants: Tenants
    pairs: Pairs
    inbox: Inbox
    forecast: Forecast
    batch: Batch
    suspended: Suspended
    buckets: Buckets
    recorder: Recorder
    scratch: Scratch
    running: Int32  # [B]
    waiting: Int32  # [S]
    finishing: Int32  # [S]
    counts: Int64  # [COUNTS]
    counters: Int64  # [len(COUNTER_NAMES)]
    pace: Int64  # [PACE_WORDS]
    fault: Int64 | NoFaultWord = NoFaultWord()  # [1] first fault found by an `expect` of compiled code: see device/expect.py
