"""Rules of grammars (R6, R25): which tokens and which drafts are legal."""

from blinkpy.queues.byte_automaton import DEAD
from blinkpy.verify.oracle.oracle_state import OracleState, Request


def allowed(state: OracleState, request: Request, token: int, stops: bool) -> bool:
    """R6: whether a token is legal: the next token of a scored prompt, or a token of the request's grammar,
    whose position it advances.
    """
    if len(request.tokens) < request.prompt_length:
        return token == request.prompt[len(request.tokens)]
    grammar, piece = request.grammar, state.pieces[token] if state.pieces else b""
    if grammar is None:
        return True
    if stops:
        return grammar.may_end(request.grammar_state)
    before, request.grammar_state = request.grammar_state, grammar.advance(request.grammar_state, piece) if piece else DEAD
    return request.grammar_state != DEAD and (ends_later(request, before) or can_end(request, request.grammar_state, 1))


def ends_later(request: Request, before: int) -> bool:
    """R6: whether, at this grammar position, the next token is legal at any distance from an end."""
    grammar, made = request.grammar, len(request.tokens) + 1 - request.prompt_length
    assert grammar is not None
    if request.ruled or not grammar.closes:
        return True
    stops = any(stop >= 0 for stop in request.stop_ids) and made > request.min_tokens
    return (grammar.may_end(before) and not stops) or not can_end(request, before, 0)


def can_end(request: Request, position: int, tokens: int) -> bool:
    """R6: whether an accepting position is reachable from a grammar position within as many bytes as tokens remain after `tokens`
    more. The search is breadth first.
    """
    grammar = request.grammar
    assert grammar is not None
    left = request.max_tokens - (len(request.tokens) - request.prompt_length) - tokens
    level, known = {position}, {position}
    for _ in range(left + 1):
        if any(grammar.may_end(one) for one in level):
            return True
        level = {after for one in level for after in grammar.following(one)} - known
        known |= level
    return False


def positions_after(state: OracleState, request: Request, drafts: list[int]) -> list[int]:
    """R25: the grammar position after each draft, up to the first draft that the grammar refuses."""
    assert request.grammar is not None
    position, positions = request.grammar_state, list[int]()
    for piece in (state.pieces[draft] for draft in drafts):
        position = request.grammar.advance(position, piece) if piece else DEAD
        if position == DEAD:
            break
        positions.append(position)
    return positions
