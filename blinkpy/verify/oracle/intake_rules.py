"""Intake of submission entries.

R2. While the command is COMMAND_RUN, entries are consumed, except those of queue pairs that are lost in this
turn. One entry of each pair is consumed in rotation, until the turn's bound of entries or of prompt tokens is
reached. An entry of another epoch, or for a slot in use, is skipped; an entry that can't be served is
refused. Words of automata and token rules count as prompt tokens. A pair has a share of slots for grammars
and token rules. An entry whose automaton or rules are stored in this epoch uses that slot, without reading
them again. Otherwise it takes an empty slot, or the slot assigned longest ago that no waiting or running
request uses. Without such a slot, or with invalid automata or rules, it is refused. A request with a scored
prompt begins with the prompt's first token.
"""

from typing import Any

from blinkpy.queues import completion as C
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.submission import SQ_ENTRY
from blinkpy.queues.token_rules import TokenRules
from blinkpy.verify.oracle.entry_rules import read_grammar, read_request
from blinkpy.verify.oracle.objects import GrammarKey, Pair, Request
from blinkpy.verify.oracle.oracle_state import OracleState
from blinkpy.verify.oracle.tenant_rules import charge


def take_in(state: OracleState, now_ns: int) -> None:
    """R2: submission entries, one of each queue pair in rotation, up to the bounds of a turn."""
    entries = tokens = 0
    pending = sum(pair.sq_tail - pair.sq_head for pair in state.pairs)
    while entries < min(pending, state.limits.intake_entries) and tokens < state.limits.intake_tokens:
        while state.pairs[state.rotation].sq_head == state.pairs[state.rotation].sq_tail:
            state.rotation = (state.rotation + 1) % state.limits.pairs
        tokens += consume(state, state.rotation, now_ns)
        state.pairs[state.rotation].sq_head += 1
        state.rotation = (state.rotation + 1) % state.limits.pairs
        entries += 1


def consume(state: OracleState, number: int, now_ns: int) -> int:
    """One entry: skipped, refused or accepted. Returns the prompt tokens that were read."""
    pair = state.pairs[number]
    entry = state.queues.sq[number, pair.sq_head % state.limits.sq_entries].view(SQ_ENTRY)[0]
    slot = number * state.limits.slots_per_pair + int(entry["slot"])
    if entry["epoch"] != pair.epoch:
        state.counters["stale_entries"] += 1
        return 0
    if not 0 <= entry["slot"] < state.limits.slots_per_pair or slot in state.live:
        state.counters["requests_rejected"] += 1
        return 0
    request, read = read_request(state.limits, state.queues, number, slot, entry, pair.epoch)
    for name in ("grammar", "rules"):
        if not request.finish and entry[f"{name}_words"]:
            read += take_grammar(state, request, pair, entry, name)
    state.live[slot] = request
    if request.finish:
        state.finishing.append(request)
        state.counters["requests_rejected"] += 1
        return read
    charge(state, request)
    request.arrival, request.arrival_us = state.arrivals, now_ns // 1000
    state.arrivals += 1
    state.unranked.append(request)
    state.counters["requests_accepted"] += 1
    state.counters["prompt_tokens"] += request.prompt_length
    return read


def take_grammar(state: OracleState, request: Request, pair: Pair, entry: Any, name: str) -> int:
    """R2: the grammar of a request, or its token rules, from its pair's share or from the arena. Returns the words that were
    read."""
    key = pair.epoch, int(entry[f"{name}_digest"]), name == "rules"
    found: ByteAutomaton | TokenRules | None = pair.grammars.pop(key, None)
    request.grammar_keys.append(key)
    if found is not None:
        have_grammar(state, request, pair, key, found)
        state.counters["grammars_reused"] += 1
        return 0
    if len(pair.grammars) >= state.limits.grammar_share:
        live = [request, *(r for r in state.running + state.waiting + state.unranked if r.pair == request.pair)]
        used = {key for r in live for key in r.grammar_keys}
        unused = [other for other in pair.grammars if other not in used]
        if not unused:
            request.reason, request.finish = C.REJECT_SHARE, C.FINISH_REJECTED
            return 0
        del pair.grammars[unused[0]]
    found = read_grammar(state.limits, state.queues, request.pair, entry, name)
    if found is None:
        request.reason = C.REJECT_GRAMMAR if name == "grammar" else C.REJECT_RULES
        request.finish = C.FINISH_REJECTED
    else:
        have_grammar(state, request, pair, key, found)
        state.counters["grammars_installed"] += 1
    return int(entry[f"{name}_words"])


def have_grammar(state: OracleState, request: Request, pair: Pair, key: GrammarKey, found: ByteAutomaton | TokenRules) -> None:
    """What an entry names is its request's now, and was used last."""
    pair.grammars[key] = found
    if isinstance(found, ByteAutomaton):
        request.grammar = found
