"""Rules of intake (R2) and of tenants' service (R18)."""

import math
from typing import Any

from blinkpy.kv.limits import Limits
from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import CELLS_WORD, ByteAutomaton
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.page_hash import HASH_SHIFT
from blinkpy.queues.request_parameters import PARAMETERS, Parameter
from blinkpy.queues.submission import SQ_ENTRY, SUBMIT_NO_PREFIX_CACHE, SUBMIT_SCORE_PROMPT
from blinkpy.queues.token_rules import FIRST_WORD, TokenRules
from blinkpy.queues.words import EPOCH_SHIFT
from blinkpy.verify.oracle.oracle_state import Account, GrammarKey, OracleState, Pair, Request


def read_request(limits: Limits, queues: EngineViews, pair: int, slot: int, entry: Any, epoch: int) -> tuple[Request, int]:
    """Read the request of a submission entry.

    entry: a record of type SQ_ENTRY.
    Returns the request, with `finish` and `reason` set if it is refused, and the number of tokens read, of its prompt and its
    prediction.
    """
    request = Request(slot, pair, int(entry["request_id"]), reason=refusal(limits, entry, epoch), most_drafts=limits.draft_tokens)
    if request.reason:
        request.finish = C.FINISH_REJECTED
        return request, 0
    start, length, first, hashes = (int(entry[f]) for f in ("prompt_offset", "prompt_length", "hash_offset", "hash_count"))
    request.prompt = queues.prompt[pair, start : start + length].tolist()
    request.tokens = request.prompt[: 1 if entry["flags"] & SUBMIT_SCORE_PROMPT else None]
    end = start + length + int(entry["predicted_tokens"])
    request.predicted = queues.prompt[pair, start + length : end].tolist()
    if not all(0 <= token < limits.vocab_size for token in request.prompt + request.predicted):
        request.reason, request.finish = C.REJECT_TOKEN, C.FINISH_REJECTED
    elif not all(0 <= key < 1 << 2 * HASH_SHIFT for key in queues.hashes[pair, first : first + hashes].tolist()):
        request.reason, request.finish = C.REJECT_HASHES, C.FINISH_REJECTED
    request.prompt_length, request.hashed = length, hashes
    request.max_tokens, request.min_tokens = int(entry["max_tokens"]), int(entry["min_tokens"])
    request.stop_ids, request.priority = tuple(entry["stop_ids"].tolist()), int(entry["priority"])
    request.ruled = bool(entry["rules_words"])
    request.tenant, request.best_effort = int(entry["tenant"]), int(entry["best_effort"])
    request.weight = int(entry["tenant_weight"])
    request.salt, request.logprobs = int(entry["cache_salt"]), bool(entry["logprobs"] >= 0)
    request.cacheable = bool(limits.prefix_caching) and not entry["flags"] & SUBMIT_NO_PREFIX_CACHE
    return request, end - start


def refusal(limits: Limits, entry: Any, epoch: int) -> int:
    """The REJECT_* code of an entry that the engine refuses regardless of its tokens, or 0."""
    length, start, hashes, first = (int(entry[f]) for f in ("prompt_length", "prompt_offset", "hash_count", "hash_offset"))
    sequence, predicted = length + int(entry["max_tokens"]), int(entry["predicted_tokens"])
    unhashed = hashes == 0 and (not limits.prefix_caching or entry["flags"] & SUBMIT_NO_PREFIX_CACHE)
    if length < 1 or start < 0 or start + length + max(0, predicted) > limits.prompt_tokens:
        return C.REJECT_PROMPT
    within = all(in_range(p, entry[p.name]) for p in PARAMETERS) and int(entry["output_tokens"]) < length
    if not within or int(entry["request_id"]) >> EPOCH_SHIFT != epoch:
        return C.REJECT_PARAMETER
    if predicted < 0 or (predicted and (limits.step_drafts or not limits.draft_tokens)):
        return C.REJECT_PARAMETER
    if sequence > limits.max_model_len or length + predicted > limits.max_model_len:
        return C.REJECT_LENGTH
    if sequence - 1 > limits.pages * limits.page_size:  # the last token needs no cache slot
        return C.REJECT_PAGES
    if not (hashes == length // limits.page_size or unhashed) or first < 0 or first + hashes > limits.hash_entries:
        return C.REJECT_HASHES
    for name, head, reason in (("grammar", CELLS_WORD, C.REJECT_GRAMMAR), ("rules", FIRST_WORD, C.REJECT_RULES)):
        words, start = int(entry[f"{name}_words"]), int(entry[f"{name}_offset"])
        if words and not (head < words <= limits.grammar_words and 0 <= start and start + words <= limits.prompt_tokens):
            return reason
    return 0


def read_grammar(limits: Limits, queues: EngineViews, pair: int, entry: Any, name: str) -> ByteAutomaton | TokenRules | None:
    """The automaton (name "grammar") or token rules ("rules") of an entry, or None if they are invalid.
    The offset and length of their words must be in range.
    """
    words = queues.prompt[pair, int(entry[f"{name}_offset"]) :][: int(entry[f"{name}_words"])].copy()
    try:
        return ByteAutomaton.of_words(words) if name == "grammar" else TokenRules.of_words(words, limits.vocab_size)
    except ValueError:
        return None


def in_range(parameter: Parameter, value: Any) -> bool:
    """Whether the engine accepts a parameter's value. -0.0 is less than 0.0, and NaN is in no range."""
    least, most = parameter.accepted
    plain = float(value) if parameter.is_float else int(value)
    if least < plain < most:
        return True
    low, high, own = ((number, math.copysign(1, number)) for number in (least, most, plain))
    return not math.isnan(plain) and low <= own <= high and not (parameter.above_low and own[0] <= low[0])


def charge(state: OracleState, request: Request) -> None:
    """R18: set the service of an accepted request, and charge its tenant."""
    peers = [r.service for r in state.waiting + state.unranked if r.best_effort == request.best_effort]
    floor = min(peers, default=state.clock)
    names = [None if a is None else (a.tenant, a.best_effort) for a in state.accounts]
    name = request.tenant, request.best_effort
    if name in names:
        request.place = names.index(name)
    else:
        held = [-1 if a is None else a.service for a in state.accounts]
        request.place = held.index(min(held))
        state.accounts[request.place] = Account(*name)
    account = state.accounts[request.place]
    assert account is not None
    request.service = max(account.service, floor)
    request.charged = cost(state, request, min(account.expected, request.max_tokens))
    account.service = request.service + request.charged


def settle(state: OracleState, request: Request, ran: bool) -> None:
    """R18: replace a request's charge by its real cost when it ends. ran: whether the request has run at least once."""
    account = state.accounts[request.place]
    if account is None or (account.tenant, account.best_effort) != (request.tenant, request.best_effort):
        return
    output = max(0, len(request.tokens) - request.prompt_length)
    served = cost(state, request, output) if ran else 0
    account.service = max(0, account.service + served - request.charged)
    account.expected += (output - account.expected) // 4 if ran else 0


def cost(state: OracleState, request: Request, output: int) -> int:
    """R18: the cost of a request in thousandths of a token, divided by its weight in hundredths."""
    return (request.prompt_length + 2 * output) * 100_000 // request.weight


def take_in(state: OracleState, now_ns: int) -> None:
    """R2: consume submission entries, one of each queue pair in rotation, up to the bounds of a turn."""
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
    """R2: skip, refuse or accept one entry. Returns the number of prompt tokens read."""
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
    """R2: attach the entry's grammar or token rules to its request, from its pair's share or from the prompt
    arena. Returns the number of words read.
    """
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
    """Attach a grammar or token rules to a request, and mark them as the most recently used of their pair."""
    pair.grammars[key] = found
    if isinstance(found, ByteAutomaton):
        request.grammar, request.grammar_state = found, found.start
