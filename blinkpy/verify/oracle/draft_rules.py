"""Rules of drafts (R25, R26): which requests have drafts, how many, and which drafts are correct."""

from collections.abc import Iterator
from itertools import takewhile

from blinkpy.queues.words import WAS_DRAFTED, WAS_PREDICTED
from blinkpy.verify.oracle.grammar_rules import positions_after
from blinkpy.verify.oracle.oracle_state import OracleState, Request, Row


def decode_rows(state: OracleState) -> list[Row]:
    """R15, R25: rows of the requests that lack one token; requests with drafts come last."""
    decoding = [r for r in state.active() if r.missing == 1]
    drafts = choose_drafts(state, decoding)
    rows = [Row(r, 1, True) for r in decoding if r not in drafts]
    for request, tokens in drafts.items():
        rows.append(Row(request, 1, True))
        rows += [Row(request, 1, True, ahead, draft) for ahead, draft in enumerate(tokens, 1)]
    state.counters["draft_tokens"] += sum(map(len, drafts.values()))
    return rows


def choose_drafts(state: OracleState, decoding: list[Request]) -> dict[Request, list[int]]:
    """R25: the drafts of each request that has drafts. Allocates their pages."""
    size, limits = state.limits.page_size, state.limits
    rows = limits.rows - len(decoding)
    if not limits.draft_tokens or state.prompts() or state.suspended or not rows:
        return {}
    if len(decoding) > limits.draft_requests:
        return {}
    spare = state.pool.available - min(len(state.running), limits.pages // 8)
    chosen, pages, asked = dict[Request, list[int]](), dict[Request, int](), 0
    for request in decoding:
        count = min(rows, wanted(state, request))
        rows -= count
        held = len(request.pages) * size - len(request.tokens)
        more = -(-max(0, count - held) // size)
        if more and request.best_effort and limits.best_effort_pages < limits.pages:
            count, more = held, 0
        asked += more
        if more and asked > spare:
            count, more = held, 0
        if count:
            chosen[request], pages[request] = continuation(state, request, count), more
            request.follows = not state.limits.step_drafts and predicted_place(state, request) >= 0
    state.pool.evict(sum(pages.values()))
    for request, more in pages.items():
        request.pages += [state.pool.take() for _ in range(more)]
    return chosen


def wanted(state: OracleState, request: Request) -> int:
    """R25: the number of drafts that a request can use. SecondOpinion checks the place from which the drafts continue."""
    source, tokens, most = int(state.sources[request.slot]), request.tokens, request.most_drafts
    if state.limits.step_drafts:
        most = min(most, len(request.returned))
    elif source == -1:
        return 0
    elif source < len(tokens) - 1:
        if tokens[source] != tokens[-1]:
            return 0
    else:
        place = predicted_place(state, request)
        if place == -1 or request.predicted[place] != tokens[-1]:
            return 0
        most = min(most, len(request.predicted) - place - 1)
    if state.free_entries(state.pairs[request.pair]) <= state.limits.rows:
        return 0
    left = request.prompt_length + request.max_tokens - len(tokens)
    most = min(most, left - 1)
    if request.grammar is None:
        return most
    legal = len(positions_after(state, request, continuation(state, request, most)))
    state.counters["draft_tokens_refused"] += most - legal
    return legal


def predicted_place(state: OracleState, request: Request) -> int:
    """R25: the place in a request's prediction that its drafts follow, from 0, or -1. The prediction ends with the request's
    row of max_model_len tokens, in which the output and its drafts overwrite it.
    """
    source, context = int(state.sources[request.slot]), state.limits.max_model_len
    place, row = source - (context - len(request.predicted)), len(request.tokens) + state.limits.draft_tokens
    return place if source >= row and 0 <= place < len(request.predicted) else -1


def continuation(state: OracleState, request: Request, count: int) -> list[int]:
    """R25: the drafts that the step returned, the predicted tokens after the place, or the tokens after the earlier place, which
    may reach into the drafts.
    """
    if state.limits.step_drafts:
        return request.returned[:count]
    place = predicted_place(state, request)
    if place >= 0:
        return request.predicted[place + 1 : place + 1 + count]
    tokens, first = list(request.tokens), int(state.sources[request.slot]) + 1
    for k in range(count):
        tokens.append(tokens[first + k])
    return tokens[len(request.tokens) :]


def right_drafts(state: OracleState, first: int) -> int:
    """R26: the number of drafts after row `first` that equal the tokens sampled before them."""
    right = 0
    for i, row in enumerate(state.rows[first + 1 :], first):
        if row.ahead != right + 1 or int(state.sampled[i]) != row.draft:
            break
        right += 1
    return right


def returned(state: OracleState, i: int, request: Request) -> list[int]:
    """R25: the drafts that the step returned for row i, the request's own row, before the step's token is appended."""
    if len(request.tokens) < request.prompt_length:
        return []
    drafts = state.drafted[i, : state.limits.step_drafts].tolist()
    return list(takewhile(lambda token: 0 <= token < state.limits.vocab_size, drafts))


def step_tokens(state: OracleState) -> Iterator[tuple[Request, int, int]]:
    """R6, R26: (request, token, flags if a draft equals it, or 0) for each token of the step to append, in order. The caller
    appends a token before it asks for the next one.
    """
    for i, row in enumerate(state.rows):
        if row.ahead or not row.emits:
            continue
        request, right, appended = row.request, right_drafts(state, i), 0
        request.returned = returned(state, i, request)
        drafted = WAS_DRAFTED | (WAS_PREDICTED if request.follows else 0)
        yield request, int(state.sampled[i]), drafted if right else 0
        while appended != right and not request.finish:
            appended += 1
            request.computed += 1
            yield request, int(state.sampled[i + appended]), drafted if right != appended else 0
        state.counters["draft_tokens_accepted"] += appended
        given = sum(other.request is request for other in state.rows) - 1
        if given:
            learn(state, request, given, appended)


def learn(state: OracleState, request: Request, given: int, right: int) -> None:
    """R25: adapt the number of drafts to the request's acceptance."""
    if right == given:
        request.most_drafts = min(state.limits.draft_tokens, 2 * request.most_drafts)
    elif right:
        request.most_drafts = right + 1
    else:
        request.most_drafts = max(1, request.most_drafts // 2)
        request.rests_until = len(request.tokens) + state.limits.draft_rest
