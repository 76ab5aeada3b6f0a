"""Rules of snapshots of recurrent states (R27, R28)."""

from blinkpy.verify.oracle.oracle_state import OracleState, Page, Request, Snapshot


def next_end(state: OracleState, request: Request) -> int:
    """R28: the last position at which the request's next chunk may end."""
    length, limits = len(request.tokens), state.limits
    ends = [length]
    if limits.snapshots and request.cacheable and not request.orphaned:
        fitting = (length - 2) // limits.page_size * limits.page_size, request.branch
        ends += [end for end in fitting if end > request.computed and end >= limits.snapshot_tokens // 16]
        ends += [request.computed + limits.snapshot_tokens - request.computed % limits.snapshot_tokens]
    return min(ends)


def wanted(state: OracleState, request: Request) -> int:
    """Maximum tokens of a request's next chunk."""
    return next_end(state, request) - request.computed


def snapshot_at(state: OracleState, page: Page) -> Snapshot | None:
    """The snapshot of the state at the end of an indexed page that is not evicted."""
    return next((s for s in state.snapshots if s.page is page), None)


def usable_hits(state: OracleState, request: Request, found: list[Page]) -> list[Page]:
    """R27: the found pages that end at a usable snapshot."""
    if not state.limits.snapshots:
        return found
    size, hits = state.limits.page_size, list(found)
    while hits and (snapshot_at(state, hits[-1]) is None or len(request.tokens) - len(hits) * size < 2):
        hits.pop()
    request.branch = len(found) * size if len(hits) != len(found) else 0
    return hits


def start_from(state: OracleState, request: Request, hits: list[Page]) -> None:
    """R27: pin the snapshot from which a request starts."""
    request.source = snapshot_at(state, hits[-1]) if hits and state.limits.snapshots else None
    if request.source is not None:
        request.source.pins += 1
        request.source.used = state.turns


def reserve(state: OracleState) -> None:
    """R28: choose a snapshot for each chunk of the planned step that ends at a position for one."""
    for request, tokens, emits, ahead, _ in state.rows:
        decodes = request.missing == 1 or ahead
        if not decodes and not emits and tokens == wanted(state, request):
            free = [s for s in state.snapshots if not s.pins]
            if free:
                unused = [s for s in free if s.page is None or not s.page.alive]
                chosen = unused[0] if unused else min(free, key=lambda s: s.used)
                chosen.page, chosen.pins = None, 1
                request.target = chosen


def settle_copies(state: OracleState) -> None:
    """R27, R28: complete the snapshot copies of the step that ended."""
    for request, *_ in state.rows:
        request.unpin()
        target, page = request.target, request.canonical
        request.target = None
        if target is None:
            continue
        target.pins = 0
        if page is None or not page.alive or request.indexed * state.limits.page_size != request.computed:
            continue
        kept = snapshot_at(state, page) or target
        kept.page, kept.used = page, state.turns
