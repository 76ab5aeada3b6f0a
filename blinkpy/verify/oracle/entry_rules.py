"""What a submission entry must be (R2), by the table of request parameters."""

import math
from typing import Any

from blinkpy.kv.limits import Limits
from blinkpy.queues import completion as C
from blinkpy.queues.byte_automaton import CELLS_WORD, ByteAutomaton
from blinkpy.queues.page_hash import HASH_SHIFT
from blinkpy.queues.request_parameters import PARAMETERS, Parameter
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE, SUBMIT_SCORE_PROMPT
from blinkpy.queues.token_rules import FIRST_WORD, TokenRules
from blinkpy.queues.views import EngineViews
from blinkpy.queues.words import EPOCH_SHIFT
from blinkpy.verify.oracle.objects import Request


def read_request(limits: Limits, queues: EngineViews, pair: int, slot: int, entry: Any, epoch: int) -> tuple[Request, int]:
    """The request of an entry, SQ_ENTRY [], with Request.finish set if it is refused; and the prompt tokens that were read."""
    request = Request(slot, pair, int(entry["request_id"]), reason=refusal(limits, entry, epoch))
    if request.reason:
        request.finish = C.FINISH_REJECTED
        return request, 0
    start, length, first, hashes = (int(entry[f]) for f in ("prompt_offset", "prompt_length", "hash_offset", "hash_count"))
    request.prompt = queues.prompt[pair, start : start + length].tolist()
    request.tokens = request.prompt[: 1 if entry["flags"] & SUBMIT_SCORE_PROMPT else None]
    if not all(0 <= token < limits.vocab_size for token in request.prompt):
        request.reason, request.finish = C.REJECT_TOKEN, C.FINISH_REJECTED
    elif not all(0 <= key < 1 << 2 * HASH_SHIFT for key in queues.hashes[pair, first : first + hashes].tolist()):
        request.reason, request.finish = C.REJECT_HASHES, C.FINISH_REJECTED
    request.prompt_length, request.hashed = length, hashes
    request.max_tokens, request.min_tokens = int(entry["max_tokens"]), int(entry["min_tokens"])
    request.stop_ids, request.priority = tuple(entry["stop_ids"].tolist()), int(entry["priority"])
    request.tenant, request.best_effort = int(entry["tenant"]), int(entry["best_effort"])
    request.weight = int(entry["tenant_weight"])
    request.salt, request.logprobs = int(entry["cache_salt"]), bool(entry["logprobs"] >= 0)
    request.cacheable = bool(limits.prefix_caching) and not entry["flags"] & SUBMIT_NO_PREFIX_CACHE
    return request, length


def refusal(limits: Limits, entry: Any, epoch: int) -> int:
    """REJECT_* for an entry that can't be served, whatever its tokens, or 0."""
    length, start, hashes, first = (int(entry[f]) for f in ("prompt_length", "prompt_offset", "hash_count", "hash_offset"))
    sequence = length + int(entry["max_tokens"])
    unhashed = hashes == 0 and (not limits.prefix_caching or entry["flags"] & SUBMIT_NO_PREFIX_CACHE)
    if length < 1 or start < 0 or start + length > limits.prompt_tokens:
        return C.REJECT_PROMPT
    within = all(in_range(p, entry[p.name]) for p in PARAMETERS) and int(entry["output_tokens"]) < length
    if not within or int(entry["request_id"]) >> EPOCH_SHIFT != epoch:
        return C.REJECT_PARAMETER
    if sequence > limits.max_model_len:
        return C.REJECT_LENGTH
    if sequence - 1 > limits.pages * limits.page_size:  # the last token is not cached
        return C.REJECT_PAGES
    if not (hashes == length // limits.page_size or unhashed) or first < 0 or first + hashes > limits.hash_entries:
        return C.REJECT_HASHES
    for name, head, reason in (("grammar", CELLS_WORD, C.REJECT_GRAMMAR), ("rules", FIRST_WORD, C.REJECT_RULES)):
        words, start = int(entry[f"{name}_words"]), int(entry[f"{name}_offset"])
        if words and not (head < words <= limits.grammar_words and 0 <= start and start + words <= limits.prompt_tokens):
            return reason
    return 0


def read_grammar(limits: Limits, queues: EngineViews, pair: int, entry: Any, name: str) -> ByteAutomaton | TokenRules | None:
    """The automaton ("grammar") or the token rules ("rules") of an entry whose places are in range; None if
    there are none.
    """
    words = queues.prompt[pair, int(entry[f"{name}_offset"]) :][: int(entry[f"{name}_words"])].copy()
    try:
        return ByteAutomaton.of_words(words) if name == "grammar" else TokenRules.of_words(words, limits.vocab_size)
    except ValueError:
        return None


def in_range(parameter: Parameter, value: Any) -> bool:
    """Whether the engine accepts a parameter's value. -0.0 lies below 0.0, and NaN nowhere."""
    least, most = parameter.accepted
    plain = float(value) if parameter.is_float else int(value)
    if least < plain < most:
        return True
    low, high, own = ((number, math.copysign(1, number)) for number in (least, most, plain))
    return not math.isnan(plain) and low <= own <= high and not (parameter.above_low and own[0] <= low[0])
