"""The results of a step, and the end of requests.

R4. The pages that a step filled are indexed after the page before them, row by row. If the index already has
an equal page there, that page replaces it. Of equal pages in one step, the first is indexed; the others, and
the pages after them, wait for the next step. A request whose last indexed page was evicted offers no further
pages.

R5. Tokens sampled by a step get their pages while the step runs, except last tokens. Either all tokens get
pages or, if there are too few pages, none.

R6. In the order of rows, a token is appended and published. While a prompt is scored, the token must be the
prompt's next token; otherwise the request ends with an error. A scored token does not count as generated, and
nothing else ends the request. In other cases, a token ends its request in three cases: it is a stop id after
min_tokens; the request reaches max_tokens or the model's context; its grammar allows no further token,
whatever min_tokens is. It ends the request with an error if it is outside the vocabulary or illegal in the
grammar. A stop id is legal where the output may end.

R7. Then requests end whose cancel was visible when the turn began, and requests of lost queue pairs: running
requests first, then waiting ones. Last completions are published in order, while the ring has space.
"""

from typing import Any

from blinkpy.queues import completion as C
from blinkpy.queues.byte_automaton import DEAD
from blinkpy.verify.oracle.objects import Request, Verdict
from blinkpy.verify.oracle.oracle_state import OracleState
from blinkpy.verify.oracle.page_pool import Page, Place
from blinkpy.verify.oracle.room_rules import best_effort_exceeds
from blinkpy.verify.oracle.tenant_rules import settle


def count_computed(state: OracleState) -> None:
    """R4: the step's tokens are in the cache; the pages that it filled are offered to the index."""
    for request, tokens, _ in state.rows:
        request.computed += tokens
        state.counters["computed_tokens"] += tokens
    left, listed, offers = state.limits.index_items, set[Any](), list[tuple[Page, Place]]()
    for request, _, _ in state.rows:
        if request.cacheable and not request.orphaned:
            left -= offer_pages(state, request, left, listed, offers)
    for page, place in offers:
        state.pool.offer(page, place)


def offer_pages(state: OracleState, request: Request, most: int, listed: set[Any], offers: list[tuple[Page, Place]]) -> int:
    """Offer a request's full pages to the index, at most `most`. listed: what this step has offered. Returns the number of
    pages that were looked at."""
    size = state.limits.page_size
    full, first, waits = request.computed // size, request.indexed, False
    request.hashed = max(request.hashed, full)
    last = min(full, first + most)
    for k in range(first, last):
        if request.canonical is not None and not request.canonical.alive:
            request.orphaned = waits = True
        place = request.canonical, request.salt, tuple(request.tokens[k * size : (k + 1) * size])
        sequence = request.salt, tuple(request.tokens[: (k + 1) * size])
        equal = state.pool.index.get(place)
        waits = waits or (equal is None and sequence in listed)
        listed.add(sequence)
        if not waits:
            if equal is None:
                equal = request.pages[k]
                offers.append((equal, place))
            request.indexed, request.canonical = k + 1, equal
    return last - first


def take_pages_early(state: OracleState) -> None:
    """R5: pages for the tokens that the step samples, if there are enough for all of them."""
    emitting = [row.request for row in state.rows if row.emits and not state.ends_next(row.request)]
    growing = [r for r in emitting if len(r.tokens) >= len(r.pages) * state.limits.page_size]
    if len(growing) <= state.pool.available and not (growing and best_effort_exceeds(state, growing)):
        state.give_page_to_each(growing)


def commit(state: OracleState) -> None:
    """R6: append the step's tokens, publish them, end what is finished."""
    for i, (request, _, emits) in enumerate(state.rows):
        if emits:
            append(state, request, int(state.sampled[i]))
    ended = [row.request for row in state.rows if row.request.finish]
    state.counters["requests_finished"] += len(ended)
    for request in ended:
        settle(state, request, True)
        state.drop(request)


def append(state: OracleState, request: Request, token: int) -> None:
    generated = len(request.tokens) + 1 - request.prompt_length
    stops = generated > request.min_tokens and token in request.stop_ids
    if not 0 <= token < state.limits.vocab_size or not allowed(state, request, token, stops):
        request.finish = C.FINISH_ERROR
        state.publish(request, 0, C.FINISH_ERROR)
        return
    last, scores = state.ends_next(request), generated <= 0
    request.tokens.append(token)
    if stops:
        request.finish = C.FINISH_STOP
    elif not scores and request.grammar is not None and request.grammar.must_end(request.grammar_state):
        request.finish = C.FINISH_COMPLETE
    elif last:
        request.finish = C.FINISH_LENGTH
    state.counters["generated_tokens"] += not scores
    state.publish(request, token, request.finish | C.HAS_TOKEN | (C.HAS_LOGPROBS if request.logprobs else 0))


def allowed(state: OracleState, request: Request, token: int, stops: bool) -> bool:
    """R6: whether a request's grammar allows a token, which moves its state; or whether it is the next one of a prompt."""
    if len(request.tokens) < request.prompt_length:
        return token == request.prompt[len(request.tokens)]
    grammar, piece = request.grammar, state.pieces[token] if state.pieces else b""
    if grammar is None:
        return True
    if stops:
        return bool(grammar.accepting[request.grammar_state])
    request.grammar_state = grammar.advance(request.grammar_state, piece) if piece else DEAD
    return request.grammar_state != DEAD


def end_lost_and_cancelled(state: OracleState, verdicts: list[Verdict], cancelled: list[Request]) -> None:
    """R7: cancelled requests, and those of revoked queue pairs."""
    for request in state.running + state.waiting:
        ran = request in state.running or request.preemptions > 0
        if verdicts[request.pair].revoke:
            settle(state, request, ran)
            state.drop(request)
        elif request in cancelled:
            settle(state, request, ran)
            request.finish = C.FINISH_CANCELLED
            state.leave(request)
            state.finishing.append(request)
        else:
            continue
        state.counters["requests_cancelled"] += 1
    for request in list(state.finishing):
        if verdicts[request.pair].revoke:
            state.drop(request)


def notify_ends(state: OracleState) -> None:
    """R7: the last completion of each, as far as there is room, in order."""
    for request in list(state.finishing):
        if state.free_entries(state.pairs[request.pair]) > 0:
            state.publish(request, request.reason, request.finish)
            state.drop(request)
