"""Seeded bugs: small changes of the source. The simulator or the properties must find each.

A bug is a patch of one module. The patched module and its importers are loaded next to the real modules, so that nothing else in
the process changes. A patch that no longer fits its module is an error: the list follows the source.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from support.import_graph import importers_of, module_name

from blinkpy.sources import PACKAGE


class Bug(NamedTuple):
    """A planted bug: its description, its module (file names of the package are unique), and its patch. `before` must occur once
    in the module; `after` replaces it."""

    what: str
    module: str
    before: str
    after: str


def _bugs(patches: dict[str, list[tuple[str, str, str]]]) -> tuple[Bug, ...]:
    """patches: module -> (description, before, after)."""
    return tuple(Bug(what, module, before, after) for module, bugs in patches.items() for what, before, after in bugs)


# fmt: off
SCHEDULER_BUGS = _bugs({
    "page_allocator": [
        ("a page is freed twice", "if references == 0:", "if references <= 1:"),
        ("a page is never freed", "references = pages.refcount[page] - 1", "references = pages.refcount[page]"),
        ("a prefix hit is not counted as a reference", "pages.refcount[page] += 1", "pages.refcount[page] += 0"),
        ("a hit page stays in line for eviction", "pages.ring_position[page] = -1\n            revived", "revived"),
        ("an evicted page stays in the index", "forget(pages, pages.free[free + i])", "pages.free[free + i]"),
        ("eviction skips a page", "last = position + 1", "last = position + 2"),
        ("two requests get the same page", "] = free - amount", "] = free - amount + (1 if amount > 2 else 0)"),
        ("compaction loses a page", "counts[S.RING_TAIL] = kept", "counts[S.RING_TAIL] = kept - 1"),
    ],
    "prefix_cache": [
        ("the tokens of a hit are not compared", "            i = 0\n", "            i = 1\n"),
        ("the salt of a hit is not compared", "pages.key[page] == key and pages.salt[page] == salt", "pages.key[page] == key"),
        ("the parent of a hit is not compared",
         "(found[k - 1] >= 0 and pages.parent[found[k]] == found[k - 1])", "found[k - 1] >= 0"),
        ("the whole prompt may be a hit", "(requests.length[slot] - 1) >> limits.", "requests.length[slot] >> limits."),
        ("an equal page is indexed twice", "return not is_duplicate(scratch, i) and scratch", "return scratch"),
        ("a page leaves half of its chain", "    if after >= 0:\n        pages.bucket_previous[after] = before\n", ""),
    ],
    "grammars": [
        ("the grammar of a waiting request is written over",
         "requests.status[slot] == S.WAITING or requests.status[slot] == S.RUNNING", "requests.status[slot] == S.RUNNING"),
        ("queue pairs share grammars", "    first, found = pair * limits.grammar_share, -1\n", "    first, found = 0, -1\n"),
        ("a grammar of an earlier epoch is found", "grammars.epoch[slot] == epoch and", "grammars.epoch[slot] <= epoch and"),
        ("the output may end anywhere", "& A.STATE_ACCEPTING != 0\n\n", "& A.STATE_ACCEPTING >= 0\n\n"),
        ("the output goes on behind its end", "elif following & ENDING != 0:", "elif following < 0:"),
        ("the last byte of a token is not looked at", "for i in range(length):", "for i in range(max(1, length - 1)):"),
        ("an output is led to an end a token too late",
         "left = entry[slot, WORD_MAX_TOKENS] - generated", "left = entry[slot, WORD_MAX_TOKENS] - generated + 1"),
        ("an output without tokens for any end is led to one", "own, position) > left + 1:", "own, position) > left + 9:"),
        ("an output that no stop id can end is led to an end", " and not may_stop(entry, slot, generated):", " and slot < 0:"),
        ("an output with token rules is led to an end", " or entry[slot, WORD_RULES_WORDS] != 0:", ":"),
        ("a string has a character too many", "            if count >= most:", "            if count > most:"),
        ("a string ends before it has its least characters", "            if count < least:", "            if count < 0:"),
        ("each byte of a string is counted", "count += 1 if following >= hubs else 0", "count += 1"),
        ("a string goes on with the count of the last one", "            count = 0\n", "            count += 0\n"),
        ("characters that a string lacks are no bytes", "far += max(0, loop_word", "far += 0 * max(0, loop_word"),
        ("token rules of a waiting request are written over",
         "requests.rules[slot] - first] = 1", "requests.rules[slot] - first] = 0"),
        ("token rules take the place of their request's grammar", "if lane == 0 and kept >= 0:", "if lane == 0 and kept < 0:"),
        ("an automaton is taken for token rules", " and holds_rules(grammars.words, slot) == rules:", ":"),
    ],
    "grammar_checks": [
        ("an automaton leads out of its states", "if following >= states:", "if following > states:"),
        ("an automaton leads out of its classes", "(words, slot, byte) >= classes:", "(words, slot, byte) > classes:"),
        ("a start with a wrong count is accepted", "bad |= 0 if is_position(", "bad |= 0 if True or is_position("),
        ("a wrong bound of distances is accepted",
         "words[slot, A.FARTHEST_WORD] == (farthest if distances > 0 else 0)", "words[slot, A.FARTHEST_WORD] >= 0"),
        ("wrong distances are accepted", " and (wrong == 0 or distances == 0)", ""),
        ("a bias of no number is accepted", "_MAGNITUDE > R.HIGHEST_BIAS_BITS:", "_MAGNITUDE > _MAGNITUDE:"),
        ("a banned token of no vocabulary is accepted",
         "R.ANY_TOKEN or token >= limits.vocab_size", "R.ANY_TOKEN or token > limits.vocab_size"),
        ("rules that allow nothing are accepted", "(mask == 0 or allowed > 0)", "(mask == 0 or allowed >= 0)"),
    ],
    "commit": [
        ("a grammar stays in its state", "requests.grammar_state[slot] = following", "requests.grammar_state[slot] += 0"),
        ("a request gets a token too many", ">= requests.entry[slot, WORD_MAX_TOKENS", "> requests.entry[slot, WORD_MAX_TOKENS"),
        ("min_tokens is off by one", "> requests.entry[slot, WORD_MIN_TOKENS]:", ">= requests.entry[slot, WORD_MIN_TOKENS]:"),
        ("the last stop id is not looked at", "for i in range(STOP_IDS):", "for i in range(2):"),
        ("a token of no vocabulary goes on", "if token < 0 or token >= limits.vocab_size:", "if token >= limits.vocab_size:"),
        ("a generated token is stored in the wrong place", ".tokens[slot, length - 1] =", ".tokens[slot, max(0, length - 2)] ="),
        ("who is cancelled pays for all that was expected", "    settle_services(state, ended, lane, lanes)\n", ""),
        ("a cancel of a waiting request is lost", ".waiting, counts[S.WAITING_COUNT], lane, lanes)", ".waiting, 0, lane, lanes)"),
        ("a cancelled request keeps its pages", ".status[scratch.slot[i]] == S.RUNNING:", ".status[scratch.slot[i]] == S.EMPTY:"),
        ("every draft is right", "batch.sampled[place] == batch.token_ids[place + 1]", "batch.sampled[place] >= 0"),
        ("right drafts are computed again", "requests.computed[slot] += 1\n", "requests.computed[slot] += 0\n"),
        ("a request goes on with drafts behind its end",
         "continues = continues and requests.finish[slot] == FINISH_NONE", "continues = continues and slot >= 0"),
        ("nobody is told of right drafts", "|= drafted << FLAG_SHIFT", "|= 0"),
        ("nobody is told which drafts were predicted", "drafted = WAS_DRAFTED | WAS_PREDICTED", "drafted = WAS_DRAFTED"),
        ("a cancel takes the pages of a request in flight",
         "== requests.request_id[slot] and requests.stalled[slot] != S.IN_FLIGHT:", "== requests.request_id[slot]:"),
    ],
    "drafts": [
        ("drafts begin a token too early", "requests.tokens[slot, source + 1 + k]", "requests.tokens[slot, source + k]"),
        ("drafts go beyond a request's last token", "min(most, left - 1)", "min(most, left + 1)"),
        ("drafts have no entries of the completion ring", "<= limits.rows:  # one", "< 0:  # one"),
        ("a prompt that is scored gets drafts", "requests.length[slot] >= requests.prompt_length[slot]", "slot >= 0"),
        ("drafts that a grammar refuses go into the step", "                return k\n", "                position = 0\n"),
        ("the drafts that grammars refuse are not counted", "refused += wanted - written", "refused += 0"),
        ("the draft before one that a grammar refuses is cut",
         "                return k\n", "                return max(0, k - 1)\n"),
        ("a draft has the position of the token before it", "(length + k + 1) & (S.DRAFT", "(length + k) & (S.DRAFT"),
        ("positions of earlier drafts stay", "(S.DRAFT_PLACES - 1)] = position", "(S.DRAFT_PLACES - 1)] += 0"),
        ("a string is counted anew in drafts", "(S.DRAFT_PLACES - 1)] = position", "(S.DRAFT_PLACES - 1)] = position & 0xFFFF"),
        ("all drafts are judged where the first one is", "requests.grammar[slot], position, token)",
         "requests.grammar[slot], requests.grammar_state[slot], token)"),
        ("drafts are judged by another grammar", "requests.grammar[slot], position, token)", "0, position, token)"),
        ("drafts take a row that is not there", "min(wanted, rows - before)", "min(wanted, rows - before + 1)"),
        ("drafts take the pages that others need next", "lacking > spare:", "lacking > spare + 2:"),
        ("best effort takes pages for drafts beyond its share", "if limited and", "if lacking < 0 and"),
        ("the pages of drafts stay on the stack", "    if lane == 0:\n        counts[S.FREE_COUNT] = free\n", ""),
        ("there is no limit of requests for drafts", "if decoding <= limits.draft_requests else 0", "if decoding >= 0 else 0"),
        ("prompts wait for drafts", "            prompts = 1\n", "            prompts = 0\n"),
        ("who had wrong drafts does not rest", "[slot] = length + limits.draft_rest", "[slot] = 0"),
        ("drafts never become more", "min(limits.draft_tokens, 2 * most)", "min(limits.draft_tokens, most)"),
        ("drafts never become fewer", "most = accepted + 1", "most = limits.draft_tokens"),
        ("other tokens count as a match", "            if equal > best:", "            if equal >= 0:"),
        ("a request begins with the drafts of the slot's last one",
         "drafts.most[slot] = limits.draft_tokens\n", "drafts.most[slot] += 0\n"),
        ("drafts that end elsewhere are taken up again", "drafts.source[slot] += accepted + 1", "drafts.source[slot] += 1"),
        ("a step's drafts begin a token too late", "batch.drafted[source, k]", "batch.drafted[source, max(0, k - 1)]"),
        ("a step's drafts go on behind one that is no token",
         "0 <= batch.drafted[row, count] < limits.vocab_size", "-1 <= batch.drafted[row, count] <= limits.vocab_size"),
        ("a step's drafts move on like earlier tokens",
         "if limits.step_drafts == 0:\n        drafts", "if slot >= 0:\n        drafts"),
        ("a request gets drafts of a step in which it had no part",
         "if row < batch.counts[S.ROWS] and batch.row_slots[row] == slot:", "if row >= 0:"),
        ("a request gets the drafts of a row that is no longer its own", " and batch.row_slots[row] == slot:", ":"),
        ("a prompt that is scored gets drafts of its step",
         "            able = batch.emits[row] != 0 and may_have_drafts(requests, slot)\n            drafts.source[slot] = row",
         "            able = batch.emits[row] != 0\n            drafts.source[slot] = row"),
        ("the drafts of a prediction begin a token too late", "            return first\n", "            return first + 1\n"),
        ("a prediction's first tokens are drafts at any place",
         "if requests.entry[slot, WORD_OUTPUT_TOKENS] == 0 and length == requests.prompt_length[slot]:", "if slot >= 0:"),
        ("tokens that the output wrote over are a prediction",
         "requests.length[slot] + limits.draft_tokens)", "requests.length[slot] - limits.draft_tokens)"),
        ("drafts go on behind a prediction",
         "most = min(most, limits.max_model_len - 1 - source)", "most = min(most, limits.rows)"),
        ("predicted tokens count as a match with tokens before them", "min(position - first, length, LONGEST_MATCH)",
         "min(position, length, LONGEST_MATCH)"),
        ("a usual turn sees no drafts of its step", "            found = 1 if able else found\n", "            found = 0\n"),
    ],
    "fast_path": [
        ("a grammar stays in its state in a usual turn", ".grammar_state[slot] = following", ".grammar_state[slot] += 0"),
        ("a usual turn does not see the last token of a request",
         "finish = C.FINISH_LENGTH if forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_IS_LAST != 0 else C.FINISH_NONE",
         "finish = C.FINISH_NONE"),
    ],
    "completions": [
        ("a full completion queue is written over", "return limits.cq_entries - (", "return limits.cq_entries + 1 - ("),
        ("the lap counter is that of the last lap", "% LAPS + 1", "% LAPS"),
        ("the completions of a fifth pair are not numbered", "limits.pairs, PAIRS_AT_ONCE)", "limits.pairs, PAIRS_AT_ONCE + 1)"),
        ("a completion goes to another slot", "local = slot - requests.pair[slot] * limits.slots_per_pair", "local = slot % 5"),
        ("what a suspended step needs of a completion queue is free", " - pairs.reserved[pair]", ""),
        ("the last token of a usual turn is not published", "strided(lane, rows, lanes):\n", "strided(lane, rows - 1, lanes):\n"),
        ("a usual turn's tokens are published again", "forecast.unpublished[0] = 0\n", "forecast.unpublished[0] = rows\n"),
        ("the tail stays behind a usual turn's tokens", "pairs.cq_tail[pair] = tail + published", "pairs.cq_tail[pair] = tail"),
    ],
    "ownership": [
        ("a lease never ends", "> limits.lease_ns:", "> 1000 * limits.lease_ns:"),
        ("a doorbell of an earlier epoch is accepted", "doorbell >> EPOCH_SHIFT == epoch:", "doorbell >> EPOCH_SHIFT <= epoch:"),
        ("a head of an earlier epoch is accepted", "if head >> EPOCH_SHIFT == epoch:", "if head >> EPOCH_SHIFT <= epoch:"),
        ("an owner's requests survive its fence", "pairs.attached[pair] = 0", "pairs.attached[pair] = 1"),
        ("a grant begins at the wrong completion",
         "pairs.cq_head[pair] = pairs.cq_tail[pair]  #", "pairs.cq_tail[pair] = pairs.cq_head[pair]  #"),
        ("a claim of any epoch is granted", "if claim == epoch + 1 and", "if claim >= epoch and"),
        ("claims are granted at any rate", ">= limits.claim_ns", ">= 0"),
        ("intake takes entries of a lost queue pair",
         "pairs.sq_head[pair] = pairs.sq_tail[pair]  #", "pairs.sq_head[pair] += 0  #"),
        ("a queue pair is lost between two groups of a step", "judges = not between_groups(state)", "judges = True"),
    ],
    "preempt": [
        ("a grammar begins anew behind a preemption",
         "requests.preemptions[slot] += 1", "requests.preemptions[slot] += 1\n        requests.grammar_state[slot] = 0"),
        ("a string is counted anew behind a preemption",
         "requests.preemptions[slot] += 1", "requests.preemptions[slot] += 1\n        requests.grammar_state[slot] %= 1 << 16"),
        ("the snapshot of a preempted request stays pinned", "            drop_source(state, slot)\n", "            pass\n"),
        ("a paused request that is preempted stays counted", ".STALLED_COUNT] -= requests.stalled[slot]", ".STALLED_COUNT] -= 0"),
        ("best effort grows beyond its pages", "while crowded or demand >", "while demand >"),
        ("who is latency-sensitive makes space for best effort",
         "able and (requests.entry[slot, WORD_BEST_EFFORT] != 0 or not best_effort_only)", "able"),
        ("the first in rank is preempted", "rank = max(rank, HIGHEST if", "rank = min(-rank, HIGHEST if"),
        ("grown pages are not taken off the stack", "S.FREE_COUNT] = free\n        counts[S.RUNNING_COUNT]", "S.RUNNING_COUNT]"),
        ("who does not fit keeps others waiting for ever",
         "min(counts[S.RUNNING_COUNT], limits.pages >> WATERMARK_SHIFT)", "1"),
        ("a request in flight gives way as if it stalled",
         "S.IN_FLIGHT\n    able = able and (requests.stalled[slot] == S.STALLED or",
         "-1\n    able = able and (requests.stalled[slot] != 0 or"),
    ],
    "intake": [
        ("every output begins in a grammar's first state",
         "start_of(state.grammars.words, grammar) if grammar >= 0 else 0", "0"),
        ("who has no rank yet is no floor of the service", "slot, waiting + entering, lane", "slot, waiting, lane"),
        ("an entry of an earlier epoch is accepted", "entry[E.WORD_EPOCH] != state.", "entry[E.WORD_EPOCH] > state."),
        ("a slot out of range is accepted", "= 0 <= local < limits.slots_per_pair", "= 0 <= local <= limits.slots_per_pair"),
        ("a request that can't fit is accepted", "> limits.page_shift > limits.pages", "> limits.page_shift > limits.pages + 1"),
        ("a prompt token of no vocabulary is accepted", "< 0 or token >= limits.vocab_size", "< 0 or token > limits.vocab_size"),
        ("the prediction of another pair is copied", "token = queues.prompt[pair, offset + i]",
         "token = queues.prompt[pair if i < length else 0, offset + i]"),
        ("predicted tokens of no vocabulary are accepted",
         "            bad |= 1\n", "            bad |= 1 if i < length else 0\n"),
        ("pages of a prediction count as hashed", "requests.hashed[slot] = entry[E.WORD_HASH_COUNT]",
         "requests.hashed[slot] = entry[E.WORD_HASH_COUNT] + (entry[E.WORD_PREDICTED_TOKENS] >> limits.page_shift)"),
        ("a prediction counts as prompt", "requests.prompt_length[slot] = length\n", "requests.prompt_length[slot] = copied\n"),
        ("a prediction may be longer than the context", "length + max(max_tokens, predicted) >", "length + max_tokens >"),
        ("the last prompt token is not copied", "lane, length + predicted, lanes)", "lane, length + predicted - 1, lanes)"),
        ("a scored prompt begins with its last token",
         "= 1 if entry[E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT != 0 else length", "= length"),
        ("intake ignores its bound", "entries < min(pending, limits.intake_entries)", "entries < pending"),
        ("claims stop intake", "if pending == 0 or", "if pending == 0 or counts[S.VERDICT_COUNT] > 0 or"),
        ("intake stays with the first pair", "counts[S.ROTATION] = pair", "counts[S.ROTATION] = 0"),
        ("new requests are taken in while draining", "!= COMMAND_RUN:", "> COMMAND_RUN + 1:"),
    ],
    "admit": [
        ("the clock of the service stands still",
         "max(state.tenants.clock[0], requests.service[slot])", "state.tenants.clock[0]"),
        ("pages that a hit takes back count as available", "hits <= available - revived", "hits <= available"),
        ("paused requests never give way",
         "victim = preemption_victim(state, True, crowded, lane, lanes)", "victim = -1"),
        ("best effort is admitted beyond its pages",
         "crowded = best_effort and not fits_best_effort(limits, state, slot, lane, lanes)", "crowded = False"),
        ("who is latency-sensitive gives way to best effort that has its pages",
         "preemption_victim(state, True, crowded, lane, lanes)", "preemption_victim(state, True, False, lane, lanes)"),
        ("best effort that has its pages keeps all others waiting", "outcome = CLASS_WAITS if crowded else", "outcome ="),
        ("best effort keeps no page for those of it that run", " + spare <= limits", " <= limits"),
        ("best effort that needs more than its pages waits for ever", "return running == 0 or held", "return held"),
        ("pages are hits without a snapshot", "hits = snapshot_hits(limits, state, slot, hits, lane, lanes)", "barrier(lanes)"),
        ("a row too many runs", "if counts[S.RUNNING_COUNT] == limits.rows or", "if counts[S.RUNNING_COUNT] > limits.rows or"),
        ("a latency-sensitive prompt waits behind a begun one that it goes before",
         " and goes_first(requests, other, slot)):", "):"),
        ("who decodes takes no tokens before a latency-sensitive prompt", "if missing == 1 or (requests", "if (requests"),
        ("best-effort requests are admitted although they yield", "        if yields:\n", "        if limits.pages < 0:\n"),
        ("best effort is admitted although its share of the step is taken",
         "if space > 0 or not best_effort:", "if space < 1 << 30:"),
        ("who passes best effort is not counted", "passed += 1 if passes else 0", "passed += 0"),
        ("who enters before best effort by rank counts as passing it", "passed += 1 if passes else 0", "passed += 1"),
        ("who passed is counted for ever", "                passed = 0\n", "                passed += 0\n"),
        ("best effort that waits for its class bars others",
         "best_effort and outcome != MUST_WAIT:", "best_effort and outcome == FITS_NOW:"),
        ("best effort that finds no space forgets who passed", "best_effort and outcome != MUST_WAIT:", "best_effort:"),
        ("best-effort prompts beyond their share take the budget of others", "- min(prompts, space), space", "- prompts, space"),
        ("who is admitted of best effort takes the budget of others",
         "min(missing, space) if best_effort else missing", "missing"),
        ("who is admitted takes nothing of the share of best effort", "space -= missing if best_effort else 0", "space -= 0"),
        ("decodes leave best effort all of its share",
         "limits.best_effort_step_tokens - (others & _COUNT_MASK)", "limits.best_effort_step_tokens"),
    ],
    "snapshots": [
        ("a snapshot outlives its page's content", " and snapshots.generation[place] == pages.generation[page]", ""),
        ("a snapshot that was replaced is found by its last page",
         "if place >= 0 and snapshots.page[place] == page and is_valid", "if place >= 0 and is_valid"),
        ("a snapshot is of a later position than its page",
         "if requests.indexed[slot] << limits.page_shift != requests.computed[slot]:", "if limits.pages < 0:"),
        ("a snapshot belongs to a page that was evicted meanwhile",
         "if page < 0 or pages.generation[page] != requests.canonical_generation[slot]:", "if page < 0:"),
        ("a snapshot is replaced while a request needs it", "if snapshots.pins[place] == 0:", "if snapshots.pins[place] >= 0:"),
        ("a request's snapshot is not pinned", "snapshots.pins[place] += 1", "snapshots.pins[place] += 0"),
        ("a snapshot is used while a step writes it", "snapshots.page[place] = S.NO_PAGE", "snapshots.page[place] += 0"),
        ("two steps of a request start from its snapshot",
         "        state.requests.snapshot_source[slot] = S.NO_SNAPSHOT\n", ""),
        ("each step of a slot writes its last snapshot", "requests.snapshot_target[slot] = S.NO_SNAPSHOT\n", "place += 0\n"),
        ("a snapshot is written by a chunk that ends elsewhere",
         "and context == chunk_end(limits, requests, slot):", "and context >= 0:"),
        ("a request starts behind its last snapshot", "            most = k + 1\n", "            most = hits\n"),
        ("a request that lacks one token starts from a snapshot",
         "(requests.length[slot] - 2) >> limits", "(requests.length[slot] - 1) >> limits"),
        ("a chunk goes beyond a place where prompts part", "if least <= branch < end:", "if least <= branch < 0:"),
        ("a chunk goes beyond the last page border of a prompt", "if last >= least:", "if last >= least + limits.tokens:"),
        ("a chunk goes beyond the distance of snapshots",
         "computed | (limits.snapshot_tokens - 1)", "computed | (2 * limits.snapshot_tokens - 1)"),
        ("the snapshot used last is replaced", "_NEWEST - (used << PLACE_BITS", "_NEWEST - ((1 << 49) - used << PLACE_BITS"),
        ("a valid snapshot is replaced before an unused one",
         "if is_valid(snapshots, state.pages, place) else 0", "if snapshots.used[place] > 0 else 1"),
        ("a start from a snapshot is no use of it",
         "        snapshots.used[place] = state.counts[S.TURNS] + 1\n", ""),
        ("two snapshots of one state are kept", "    if known < 0:\n", "    if known < limits.snapshots:\n"),
        ("a request without the prefix cache gets snapshots",
         " or not uses_prefixes(limits, requests, slot):", ":"),
    ],
    "recorder": [
        ("a prediction lies a token before the end of its row", "limits.max_model_len - predicted + i - length",
         "limits.max_model_len - predicted + i - length - 1"),
        ("a prediction is not written down", "first + i) & mask] = (requests.tokens[slot, place]",
         "first + i) & mask] = (requests.tokens[slot, 2 * i]"),
        ("a cancel is not written down", "slots[i] if finish[slots[i]] == cancelled else -1", "-1"),
        ("an odd prompt loses its last token", "(copied + 1) >> 1", "copied >> 1"),
        ("a claim by itself leaves no record", "note_word(seen, 5 * pair + 1, inbox.claim[pair])", "0"),
        ("the last token of a step is not written down", "lane, committed, lanes):", "lane, committed - 1, lanes):"),
        ("a turn between two groups leaves no record", "planned + notes + group == 0", "planned + notes == 0"),
        ("a step's drafts are not written down", "& mask] = batch.drafted[row, k]", "& mask] = -1"),
        ("the tokens of a step are written down behind each group",
         "batch.counts[S.ROWS] if ended else 0", "batch.counts[S.ROWS]"),
        ("a step that goes on is written down as a new one", "batch.counts[S.ROWS] if group == 0 else 0", "batch.counts[S.ROWS]"),
    ],
    "forecast": [
        ("wrong drafts count as computed", "if batch.emits[row] != S.DRAFT:  # commit", "if batch.emits[row] >= 0:  # commit"),
        ("a usual turn sees no drafts", "        and not drafting\n", ""),
        ("best effort grows beyond its pages during a step",
         "if exceeds_pages(limits, state, best_effort, lane, lanes):", "if limits.pages < 0:"),
        ("a usual turn has no pace", "state.pace[S.PACE_STEP_NS] == limits.pace_ns", "limits.pages > 0"),
        ("a usual turn keeps the count of turns of yielding", " + counts[S.YIELDED_TURNS] == 0", " == 0"),
        ("a usual turn keeps the count of who passed best effort", " and counts[S.PASSED] == 0)", ")"),
        ("tokens count as computed behind each group", "if rows == 0 or not step_ended(batch):", "if rows == 0:"),
        ("pages are given behind each group",
         "    if not step_ended(batch):\n        return False", "    if rows < 0:\n        return False"),
        ("a usual turn is taken while a step is suspended",
         "and rows == counts[S.RUNNING_COUNT]\n        and nobody_enters\n"
         "        and counts[S.FINISHING_COUNT] + counts[S.STALLED_COUNT] +",
         "and rows + counts[S.STALLED_COUNT] == counts[S.RUNNING_COUNT]\n        and nobody_enters\n"
         "        and counts[S.FINISHING_COUNT] +"),
    ],
    "pace": [
        ("steps wait although a prompt waits", ".counts[S.WAITING_COUNT] == 0", ".counts[S.WAITING_COUNT] >= 0"),
        ("a late request does not catch up", "min(requests.first_token_ns[slot] + generated * pace_ns, last + pace_ns)",
         "last + pace_ns"),
        ("who is ahead waits for longer than a pace", " * pace_ns, last + pace_ns)", " * pace_ns, NEVER)"),
        ("latency-sensitive requests have best effort's pace", "if best_effort else limits.pace_ns",
         "if best_effort else limits.best_effort_pace_ns"),
        ("best-effort requests have the others' pace", "limits.best_effort_pace_ns if best", "limits.pace_ns if best"),
        ("best effort's pace alone holds no step",
         "    if limits.best_effort_pace_ns == 0:\n", "    if limits.pace_ns == 0:\n"),
        ("best effort's pace alone measures no step", "if limits.best_effort_pace_ns == 0 or", "if limits.pace_ns == 0 or"),
        ("a step begins when its tokens are due", " - pace[S.PACE_STEP_NS]\n", "\n"),
        ("one slow step counts for ever", "known - (known >> DECAY_SHIFT)", "known"),
        ("the pace begins anew with each token", ".length[slot] == requests.prompt", ".length[slot] >= requests.prompt"),
        ("a request whose reader is slow hurries all steps", "stalled[slot] == 0:", "stalled[slot] >= 0:"),
        ("a very slow step counts for long", "min(slowest, limits.best_effort_pace_ns)", "slowest"),
        ("every step counts as held for a whole pace", "+= now - since", "+= limits.pace_ns"),
        ("tokens come behind each group", " or not step_ended(state.batch):", ":"),
    ],
    "yielding": [
        ("who is latency-sensitive yields", "WORD_BEST_EFFORT] != 0 and requests.", "WORD_BEST_EFFORT] == 0 and requests."),
        ("who is passed over makes others yield", " and state.pairs.unclaimed_entries[requests.pair[slot]] > 0:", ":"),
        ("who waits for a row makes others yield", "(first >= 0 and counts[S.RUNNING_COUNT] < limits.rows)", "first >= 0"),
        ("best effort is passed without end", "passed < limits.yield_steps or", "passed >= 0 or"),
        ("one more passes best effort", "passed < limits.yield_steps or", "passed <= limits.yield_steps or"),
        ("best effort behind others bars them", "passes = best_effort > first", "passes = best_effort > 0"),
        ("the last one in the line enters first", "first = max(first, waiting - i)", "first = waiting - i"),
        ("one that just entered enters again", "requests.status[slot] == S.WAITING and ", ""),
        ("best-effort prompts yield for ever", "lanes) and yielded < limits.yield_steps\n", "lanes)\n"),
        ("prompts yield where there is no best effort", "has_best_effort(state, lane, lanes) and ", ""),
        ("prompts yield to none while all best effort waits",
         "found += 1 if requests.entry[state.waiting[i], WORD_BEST_EFFORT] != 0 else 0", "found += 0"),
        ("turns of yielding are not counted", "yielded + 1 if yields", "yielded if yields"),
        ("turns of yielding are never forgotten", "yielded + 1 if yields else 0", "yielded + 1 if yields else yielded"),
        ("two requests of best effort may hold all pages", "return running > 1 and", "return running > 2 and"),
        ("who is alone of best effort may not hold more than its pages", "return running > 1 and", "return running > 0 and"),
        ("pages of best effort are not counted", "requests.num_pages[slot] << _COUNT_BITS | 1", "1"),
    ],
    "suspension": [
        ("a step is resumed with the group that ran last", "suspended.counts[S.GROUP] += 1", "suspended.counts[S.GROUP] += 0"),
        ("a step is resumed behind its next group", "suspended.counts[S.GROUP] += 1", "suspended.counts[S.GROUP] += 2"),
        ("a group is left out",
         "batch.counts[S.GROUP] += 1\n    barrier(lanes)\n    return", "batch.counts[S.GROUP] += 2\n    return"),
        ("a suspended step's tokens are not restored",
         "target.token_ids[i] = source.token_ids[i]", "target.token_ids[i] += 0"),
        ("a suspended step's cache slots are not restored",
         "target.cache_slots[i] = source.cache_slots[i]", "target.cache_slots[i] += 0"),
        ("a suspended step's padding is not restored", "state.buckets.tokens[bucket], state.buckets.rows[bucket]\n",
         "source.counts[S.TOKENS], source.counts[S.ROWS]\n"),
        ("the end of a suspended step's last row is lost", "target.query_starts[rows] = source.query_starts[rows]",
         "target.query_starts[rows] += 0"),
        ("nothing of a completion queue is kept for a suspended step", "= taken", "= 0"),
        ("what was kept for a suspended step stays kept", "state.pairs.reserved[pair] = 0", "state.pairs.reserved[pair] += 0"),
        ("one step more than the bound interrupts",
         "S.INTERRUPTIONS] < limits", "S.INTERRUPTIONS] <= limits"),
        ("steps that interrupt are not counted", "S.INTERRUPTIONS] += 1", "S.INTERRUPTIONS] += 0"),
        ("a suspended step stays so while nobody interrupts it", "S.INTERRUPTS] = 1 if interrupts else 0", "S.INTERRUPTS] = 1"),
        ("a step is suspended for who may not pass",
         "next_to_pass(limits, state, counts[S.PASSED],", "next_to_pass(limits, state, 0,"),
        ("a step is suspended for who finds no row", "< limits.rows:", "<= limits.rows:"),
        ("a step is suspended for who finds no pages", "<= spare_pages(limits, counts)", "<= limits.pages"),
        ("a step is suspended although the engine stops", "state.inbox.command[0] != COMMAND_STOP", "limits.pages > 0"),
        ("requests stay in flight behind their step",
         "state.batch.row_slots[row]] = S.IN_FLIGHT", "state.batch.row_slots[row]] = 0"),
    ],
    "cycle": [
        ("a snapshot is complete before its step",
         "        if is_suspended(state):\n            bucket", "        settle(limits, state, lane, lanes)\n"
         "        if is_suspended(state):\n            bucket"),
        ("a drain ends while a step is suspended", "== COMMAND_DRAIN and counts[S.RUNNING_COUNT] +",
         "== COMMAND_DRAIN and counts[S.RUNNING_COUNT] - counts[S.STALLED_COUNT] +"),
        ("a stop ends the loop while a step is suspended",
         "    if is_suspended(state):\n        result", "    if command < 0:\n        result"),
        ("steps that interrupt count as turns of yielding",
         "yields = is_suspended(state) or begin_yield", "yields = begin_yield"),
        ("requests of a step that ended are in flight", "        end_flight(state, lane, lanes)", "        barrier(lanes)"),
    ],
    "tenant_service": [
        ("an output costs as much as a prompt", "OUTPUT_COST * output", "output"),
        ("all tenants have one weight", "WEIGHT_ONE) // weight", "WEIGHT_ONE) // WEIGHT_ONE"),
        ("a tenant saves service up while it is idle", "max(service, tenants.service[row])", "tenants.service[row]"),
        ("who comes back is lifted to the other class",
         "if requests.entry[state.waiting[i], WORD_BEST_EFFORT] == entry[WORD_BEST_EFFORT]:", "if floor > 0:"),
        ("the classes of a tenant have one counter", "key = entry[WORD_TENANT] << 1 | entry[WORD_BEST_EFFORT]",
         "key = entry[WORD_TENANT] << 1"),
        ("who never ran pays for its prompt",
         "status[slot] == S.RUNNING or requests.preemptions[slot] > 0", "status[slot] > S.EMPTY"),
        ("who was preempted pays nothing", "== S.RUNNING or requests.preemptions[slot] > 0:", "== S.RUNNING:"),
        ("nothing is settled at the end", "+ served - requests.charged[slot]", "+ 0"),
        ("another tenant pays",
         "if tenants.key[row] == entry[slot, WORD_TENANT] << 1 | entry[slot, WORD_BEST_EFFORT]:", "if row >= 0:"),
        ("one output tells all", ">> LEARNING_SHIFT", ">> 0"),
        ("the tenant that was served most is forgotten",
         "if tenants.service[row] == least:", "if tenants.service[row] != least:"),
    ],
    "plan": [
        ("a draft has the place of the token before it", "write_token(limits, requests, batch, place, place, slot, position)",
         "write_token(limits, requests, batch, place, place, slot, max(0, position - (1 if k > 0 else 0)))"),
        ("a prompt is not cut for its snapshots",
         "missing = chunk_end(limits, requests, slot) -", "missing = requests.length[slot] -"),
        ("a draft emits like its request's row", "1 if k == 0 else S.DRAFT)", "1)"),
        ("a page table is read one entry off", "requests.page_table[slot, position", "requests.page_table[slot, (position + 1)"),
        ("the last chunk of a prompt emits nothing", "emits = 1 if after == requests.", "emits = 1 if after > requests."),
        ("a batch is larger than its bucket", "or state.buckets.rows[bucket] < rows:", "or state.buckets.rows[bucket] < 0:"),
        ("a chunk exceeds the token budget", "chunk = min(granted, budget - first)", "chunk = granted"),
        ("steps beside decodes have no space for prompts", "budget = limits.mixed_tokens", "budget = decoding"),
        ("a burst's steps have no space for prompts", "budget = limits.burst_step_tokens", "budget = decoding"),
        ("padding keeps old cache slots", "batch.cache_slots[i] = -1", "batch.cache_slots[i] += 0"),
        ("a best-effort prompt has a part although it yields",
         "found = 0 if yields and requests.entry[slot, WORD_BEST_EFFORT] != 0 else 1", "found = 1"),
        ("latency-sensitive prompts have chunks in the order of their begin",
         "        if yields:\n            place", "        if count < 0:\n            place"),
        ("a step for latency-sensitive prompts is as large as others",
         "    if yields:\n        budget", "    if decoding < 0:\n        budget"),
        ("decodes take the tokens of latency-sensitive prompts",
         "decoding + limits.sensitive_step_tokens", "limits.sensitive_step_tokens"),
        ("a small step is cut into as many groups as the largest",
         "groups_of_step(limits.step_groups, size, limits.tokens)", "limits.step_groups"),
        ("a long prompt fills the step of those that end", "limits.sensitive_step_tokens // 2 - first", "limits.tokens - first"),
        ("a latency-sensitive prompt alone has half a step", " and first > decode_rows:", ":"),
        ("best-effort prompts yield to nobody", "yields and sensitive_prompt_runs(state, lane, lanes)", "yields"),
        ("best-effort prompts fill a step beyond their share", "max(0, min(asked, space - before))", "asked"),
        ("each best-effort prompt has the share of all", "space -= total", "space -= 0"),
        ("decodes take nothing of the share of best effort",
         "limits.best_effort_step_tokens - decode_rows", "limits.best_effort_step_tokens"),
        ("latency-sensitive prompts have the share of best effort",
         "granted if i < count and best_effort_prompt(requests, slot) else 0", "granted"),
        ("steps without best effort are cut",
         "if flexible > 0 and tokens > limits.cut_tokens:", "if tokens > limits.cut_tokens:"),
        ("a step is cut that is short", "tokens > limits.cut_tokens:", "tokens >= limits.cut_tokens:"),
        ("who decodes has no part in a step that interrupts", "requests.computed[slot] == 1 else 1 << _HALF",
         "requests.computed[slot] == 1 and not is_suspended(state) else 1 << _HALF"),
    ],
    "waiting_list": [
        ("a request is ranked among the better ones", "if requests.rank[other] < rank or", "if requests.rank[other] > rank or"),
        ("requests without a rank are left behind", "] = ranked + unranked", "] = ranked + min(unranked, 2)"),
        ("policies see no class", "int(requests.entry[slot, WORD_BEST_EFFORT])", "0"),
        ("policies see no service of tenants", "requests.service[slot],", "requests.charged[slot],"),
        ("who ends pays for all that was expected", "    settle_services(state, ended, lane, lanes)\n", ""),
        ("a request may run without space for its token", "[i] >= pairs.unclaimed_entries[", "[i] > pairs.unclaimed_entries["),
        ("a request in flight has a part in a step that interrupts its own",
         "requests.stalled[state.running[i]] == S.IN_FLIGHT  #", "limits.pairs < 0  #"),
    ],
})

# Bugs for the state machine, which compares with the rules: in the client, and in state that no front end can see.
FRONT_BUGS = _bugs({
    "commit": [
        ("tokens of a prompt count as generated",
         "!= 0 and requests.length[slot] > requests.prompt_length[slot] else", "!= 0 else"),
    ],
    "fast_path": [
        ("a usual turn counts a prompt's tokens as generated", "+ rows - state.forecast.scores[0]", "+ rows"),
    ],
    "admit": [
        ("a hit word has another name", "pair[slot], requests.request_id[slot]", "pair[slot], requests.arrival[slot]"),
        ("pages of a request's own count as hits", "if requests.preemptions[slot] == 0:", "if requests.preemptions[slot] >= 0:"),
    ],
    "queue_pair": [
        ("a request id is used twice", "        self._requests += 1\n", "        self._requests += len(prompt) & 1\n"),
        ("the doorbell is rung before the entry",
         "transport.write_prompt(prompt_offset, prompt if",
         "transport.ring_doorbell(self._stamp(self._sq_tail + 1))\n        transport.write_prompt(prompt_offset, prompt if"),
        ("a slot is free before its last completion", "if flags & FINISH_MASK:", "if flags:"),
        ("a completion of the last lap is read again", "lap = lap_of(position, size)", "lap = words[0] >> LAP_SHIFT"),
        ("the completion head runs ahead", "._stamp(position))\n        return", "._stamp(position + 1))\n        return"),
        ("arena space comes back too early", "self._unconsumed[0][0] <= head:", "self._unconsumed[0][0] <= head + 1:"),
        ("positions of before a claim are kept", "self._reset(words.sq_head, words.cq_tail)", "self._reset(words.sq_head, 0)"),
        ("doorbells carry no epoch", "return self.epoch << W.EPOCH_SHIFT | position", "return 1 << W.EPOCH_SHIFT | position"),
        ("a heartbeat does not repeat the doorbell", "._ring()\n            self.transport.write_word", ".transport.write_word"),
        ("a heartbeat is always the same", "self._beat += 1", "self._beat = 1"),
        ("more grammars are in flight than the share holds", "<= self.facts.grammar_share", "<= self.facts.grammar_share + 1"),
        ("a fence is not noticed", "if pair.epoch != self.epoch or pair.attached != 1:", "if pair.epoch != self.epoch:"),
    ],
    "grammar_arena": [
        ("grammars lie on each other", "if piece.offset - start >= words:", "if piece.offset - start > words // 2:"),
        ("a piece of the arena wraps", "if offset + count > self.size:", "if offset + count > 2 * self.size:"),
        ("an arena gives out what is in use", "if start + count - self.head > self.size:", "if start - self.head > self.size:"),
    ],
})
# fmt: on
ARENA_BUGS = ("a piece of the arena wraps", "an arena gives out what is in use")
"""Bugs that only random allocations in an arena find."""


def module_of(bug: Bug) -> tuple[str, Path]:
    """The module's dotted name and its file."""
    (path,) = PACKAGE.rglob(f"{bug.module}.py")
    return module_name(path), path


def patched_source(bug: Bug) -> str:
    """The module's source with the bug. Raises ValueError if the patch does not fit."""
    source = module_of(bug)[1].read_text()
    if source.count(bug.before) != 1:
        raise ValueError(f"{bug.what}: {bug.before!r} occurs {source.count(bug.before)} times in {bug.module}, not once")
    return source.replace(bug.before, bug.after)


@contextlib.contextmanager
def planted(bug: Bug | None) -> Iterator[None]:
    """Within the block, imports of the patched module and its importers return new modules; without a bug, of the scheduler's
    modules. The end of the block restores the old modules."""
    name, path = ("blinkpy.kv.page_allocator", PACKAGE / "kv" / "page_allocator.py") if bug is None else module_of(bug)
    with replaced(name, path, path.read_text() if bug is None else patched_source(bug)):
        yield


class _Source(importlib.abc.InspectLoader):
    """A loader that marks a module whose source differs from its file."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source


@contextlib.contextmanager
def replaced(name: str, path: Path, source: str) -> Iterator[None]:
    """Within the block, imports of a module and its importers return new modules, and the module has this source."""
    names = sorted(({name} | importers_of(name)) - {"blinkpy"})
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=_Source(source)))
        _enter(name, module)
        exec(compile(source, str(path), "exec"), module.__dict__)
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        for name, module in before.items():
            _enter(name, module)


def _enter(name: str, module: ModuleType) -> None:
    """Make imports of the name return this module."""
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, module)
