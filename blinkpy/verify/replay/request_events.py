"""Derives each request's events, and their reasons, from the states before and after a turn."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from blinkpy.kv import state as S
from blinkpy.kv.grammars import must_end
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues import words as C
from blinkpy.queues.submission import STOP_IDS, WORD_BEST_EFFORT, WORD_MAX_TOKENS, WORD_MIN_TOKENS, WORD_STOP_IDS
from blinkpy.scheduler.phases.preempt import WATERMARK_SHIFT
from blinkpy.verify.replay.replayer import Entry, Turn

REJECTIONS = {
    C.REJECT_PROMPT: "its prompt is empty or outside the arena",
    C.REJECT_LENGTH: "prompt and max_tokens are beyond the engine's context",
    C.REJECT_PAGES: "it can never fit into the page pool",
    C.REJECT_HASHES: "the number of page hashes differs from the number of the prompt's full pages",
    C.REJECT_TOKEN: "a prompt token is outside the vocabulary",
    C.REJECT_PARAMETER: "a parameter is out of range",
    C.REJECT_GRAMMAR: "its grammar's automaton is invalid or too large",
    C.REJECT_SHARE: "the grammars and token rules of running requests use the whole share of its queue pair",
    C.REJECT_RULES: "its token rules are invalid or too long",
}
YIELDS = "it yields to latency-sensitive prompts"
WHY_REVOKED = ((S.EXPIRED, "its lease ended"), (S.BROKEN, "it broke the protocol"))


class Event(NamedTuple):
    """One event of a turn. request: its arrival number, or -1. kind: one word."""

    request: int
    kind: str
    text: str


class EventTracer:
    """Derives events from a replay's state. Call `events_of` after each turn."""

    def __init__(self, limits: Limits, state: State):
        self.limits, self.state = limits, state
        self._reasons: dict[int, str] = {}
        self._arrived_ns: dict[int, int] = {}
        self._remember()

    def _remember(self) -> None:
        r = self.state.requests
        self._status = r.status.copy()
        self._id = r.request_id.copy()
        self._length = r.length.copy()
        self._arrival = r.arrival.copy()
        self._stalled = r.stalled.copy()
        self._preemptions = r.preemptions.copy()
        self._suspended = int(self.state.suspended.counts[S.ROWS])
        self._attached, self._arrivals = self.state.pairs.attached.copy(), int(self.state.counts[S.ARRIVALS])

    def events_of(self, turn: Turn) -> list[Event]:
        """The events of the turn, in the order of its phases."""
        self._turn = turn
        events = [*self._ends(), *self._pairs(), *map(self._taken, turn.entries), *self._stalls()]
        preempted = list(self._preempted())
        events += [*preempted, *self._starts(), *self._chunks(), *self._suspensions(), *self._waits(bool(preempted))]
        self._remember()
        return events

    # ---- one phase each -------------------------------------------------------------------------------------------------

    def _same(self, slot: int) -> bool:
        """Whether the slot still holds the same request as before the turn."""
        return bool(self.state.requests.request_id[slot] == self._id[slot])

    def _ends(self) -> Iterator[Event]:
        requests = self.state.requests
        alive = (self._status == S.RUNNING) | (self._status == S.WAITING)
        for slot in np.flatnonzero(alive).tolist():
            same, pair = self._same(slot), int(requests.pair[slot])
            if same and requests.status[slot] in (S.RUNNING, S.WAITING):
                continue
            request, was = int(self._arrival[slot]), "running" if self._status[slot] == S.RUNNING else "waiting"
            self._reasons.pop(request, None)
            if slot in self._turn.cancelled:
                yield Event(request, "cancelled", f"its front end cancelled it while it was {was}")
            # a request that ended by itself in the same turn has FINISH_NONE
            elif same and requests.finish[slot] == S.NO_OWNER:
                yield Event(request, "dropped", f"its front end lost queue pair {pair} while it was {was}")
            else:
                yield Event(request, "finished", self._finish(slot, same))

    def _finish(self, slot: int, same: bool) -> str:
        """Why the last step ended the request, by the rules of append_token(). In a reused slot, only the length is known."""
        requests, limits = self.state.requests, self.limits
        if not same:
            return f"after {int(self._length[slot]) + 1} tokens, prompt and output"
        length, prompt = int(requests.length[slot]), int(requests.prompt_length[slot])
        generated, most = length - prompt, int(requests.entry[slot, WORD_MAX_TOKENS])
        stops = requests.entry[slot, WORD_STOP_IDS : WORD_STOP_IDS + STOP_IDS].tolist()
        if length == self._length[slot]:
            return f"by an error of the step, after {max(0, generated)} tokens"
        if int(requests.tokens[slot, length - 1]) in stops and generated > requests.entry[slot, WORD_MIN_TOKENS]:
            return f"with a stop token, after {generated} tokens"
        grammar, words = requests.grammar[slot], self.state.grammars.words
        if grammar >= 0 and must_end(words, grammar, requests.grammar_state[slot]):
            return f"at the end of its grammar, after {generated} tokens"
        if generated >= most:
            return f"at max_tokens, after {generated} tokens"
        return f"at the context of {limits.max_model_len} tokens"

    def _pairs(self) -> Iterator[Event]:
        for pair, (before, now) in enumerate(zip(self._attached.tolist(), self.state.pairs.attached.tolist(), strict=True)):
            verdict = int(self.state.pairs.verdict[pair])
            if before and verdict & S.REVOKE:
                why = next((text for bit, text in WHY_REVOKED if verdict & bit), "it was claimed again")
                yield Event(-1, "revoked", f"queue pair {pair}: {why}")
            if verdict & S.GRANT and now:
                yield Event(-1, "granted", f"queue pair {pair} to its claimant")

    def _taken(self, entry: Entry) -> Event:
        requests, limits = self.state.requests, self.limits
        slot = entry.pair * limits.slots_per_pair + entry["slot"]
        usable = 0 <= entry["slot"] < limits.slots_per_pair
        repeated = usable and self._status[slot] != S.EMPTY and self._same(slot)
        if not usable or requests.request_id[slot] != entry["request_id"] or repeated:
            return Event(-1, "ignored", f"an entry of queue pair {entry.pair}: stale epoch, or its slot is in use")
        # The request may have ended in this turn. Then its status hides a rejection, but it has no arrival
        # number.
        if requests.arrival[slot] < self._arrivals or requests.prompt_length[slot] == 0:
            reason = REJECTIONS.get(int(requests.finish[slot]) >> S.FINISH_REASON_SHIFT, "its entry is not valid")
            return Event(-1, "rejected", f"an entry of queue pair {entry.pair}: {reason}")
        request = int(requests.arrival[slot])
        self._arrived_ns[request] = self._turn.now_ns
        tenant = f", tenant {entry['tenant']}" if entry["tenant"] else ""
        tenant += ", best effort" if entry["best_effort"] else ""
        given = f"{entry['prompt_length']} prompt tokens"
        given += f", {entry['predicted_tokens']} predicted tokens" if entry["predicted_tokens"] else ""
        before = int(entry["output_tokens"])
        moved = f", moved here from another engine with {before} tokens of output, at the end of its prompt" if before else ""
        text = (
            f"from queue pair {entry.pair}, id {entry['request_id'] >> 32}:{entry['request_id'] & 0xFFFFFFFF}: "
            f"{given}, at most {entry['max_tokens']} new, priority {entry['priority']}{tenant}, "
            f"rank {requests.rank[slot]}{moved}"
        )
        return Event(request, "accepted", text)

    def _active(self, status: int) -> list[int]:
        return np.flatnonzero(self.state.requests.status == status).tolist()

    def _preempted(self) -> Iterator[Event]:
        requests = self.state.requests
        for slot in self._active(S.WAITING):
            if self._same(slot) and requests.preemptions[slot] > self._preemptions[slot]:
                why = "its reader is behind, and a better request needs its pages"
                if not self._stalled[slot]:
                    why = f"no page was free; its rank {int(requests.rank[slot])} was the last of the running requests"
                text = f"{why}; it has {int(requests.length[slot])} tokens to compute again"
                yield Event(int(requests.arrival[slot]), "preempted", text)

    def _stalls(self) -> Iterator[Event]:
        requests = self.state.requests
        for slot in self._active(S.RUNNING):
            before, now = self._stalled[slot] == S.STALLED and self._same(slot), requests.stalled[slot] == S.STALLED
            if before != now:
                text = f"the completion ring of queue pair {int(requests.pair[slot])} {'is full' if now else 'has space again'}"
                yield Event(int(requests.arrival[slot]), "stalled" if now else "continues", text)

    def _starts(self) -> Iterator[Event]:
        requests = self.state.requests
        for slot in self._active(S.RUNNING):
            if self._status[slot] == S.RUNNING and self._same(slot) and requests.preemptions[slot] == self._preemptions[slot]:
                continue
            request, hits = int(requests.arrival[slot]), int(requests.hit_tokens[slot])
            text = f"{int(requests.length[slot])} tokens, {hits} of them cached, {int(requests.num_pages[slot])} pages"
            if request in self._arrived_ns:
                text += f"; {(self._turn.now_ns - self._arrived_ns[request]) / 1e6:.3f} ms after its arrival"
            self._reasons.pop(request, None)
            yield Event(request, "starts", text)

    def _chunks(self) -> Iterator[Event]:
        requests = self.state.requests
        size = int(self._turn.planned[:, 1].sum())
        for slot, tokens in self._turn.planned.tolist():
            length, computed = int(requests.length[slot]), int(requests.computed[slot])
            if tokens > 1 or computed + tokens < length:
                rest = length - computed - tokens
                text = f"prompt tokens {computed} to {computed + tokens} of {length}"
                text += f": the step's {size} tokens leave {rest} for later" if rest else ", the last ones"
                yield Event(int(requests.arrival[slot]), "chunk", text)

    def _suspensions(self) -> Iterator[Event]:
        kept, turn = self.state.suspended.counts, self._turn
        if kept[S.ROWS] and not self._suspended:
            text = f"a step of {int(kept[S.TOKENS])} tokens before group {int(kept[S.GROUP])} of its {int(kept[S.GROUPS])}"
            yield Event(-1, "suspended", f"{text}, for latency-sensitive prompts")
        elif self._suspended and not kept[S.ROWS]:
            steps = int(self.state.counts[S.INTERRUPTIONS])
            yield Event(
                -1, "resumed", f"the suspended step, with group {turn.group} of its {turn.groups}, after {steps} other steps"
            )

    # ---- reasons to wait ------------------------------------------------------------------------------------------------

    def _waits(self, preempted: bool) -> Iterator[Event]:
        """Yield the reason of each waiting request if it changed."""
        state = self.state
        requests, counts = state.requests, state.counts
        blocker, of_class = -1, -1  # the first request in order, and the first best-effort request
        for slot in state.waiting[: int(counts[S.WAITING_COUNT])].tolist():
            request = int(requests.arrival[slot])
            if state.pairs.unclaimed_entries[requests.pair[slot]] <= 0:
                reason = f"the completion ring of queue pair {int(requests.pair[slot])} is full"
            elif (first := max(blocker, of_class if requests.entry[slot, WORD_BEST_EFFORT] else -1)) >= 0:
                reason = f"behind #{first}, which is served first"
            elif not preempted and (shortage := self._class_shortage(slot)):
                reason, of_class = shortage, request
            else:
                reason, blocker = self._shortage(slot, preempted), request
            kind = reason.split(":")[0].split(" #")[0]
            if self._reasons.get(request) != kind:
                self._reasons[request] = kind
                yield Event(request, "waits", reason)

    def _class_shortage(self, slot: int) -> str:
        """The class resource that a best-effort request lacks; "" if it waits for another reason."""
        state, limits = self.state, self.limits
        entry, bound, share = state.requests.entry, limits.best_effort_pages, limits.best_effort_step_tokens
        if not entry[slot, WORD_BEST_EFFORT]:
            return ""
        if state.counts[S.YIELDED_TURNS] or state.suspended.counts[S.ROWS]:
            return YIELDS if state.counts[S.PASSED] < limits.yield_steps else ""
        running = state.running[: int(state.counts[S.RUNNING_COUNT])].tolist()
        flexible = [other for other in running if entry[other, WORD_BEST_EFFORT]]
        held, need = int(state.requests.num_pages[flexible].sum()), -(-int(state.requests.length[slot]) // limits.page_size)
        if flexible and bound < limits.pages and held + need + min(len(flexible), bound >> WATERMARK_SHIFT) > bound:
            return f"best effort's share of the pages: it needs {need}; {held} of {bound} are held"
        filled = sum(tokens for other, tokens in self._turn.planned.tolist() if other in flexible or tokens == 1)
        return f"best effort's share of the step: its {share} tokens are taken" if filled >= share < limits.tokens else ""

    def _shortage(self, slot: int, preempted: bool) -> str:
        """The resource that the first waiting request lacks."""
        state, limits = self.state, self.limits
        requests, counts = state.requests, state.counts
        running = state.running[: int(counts[S.RUNNING_COUNT])]
        wanted = int(sum(requests.length[s] - requests.computed[s] for s in running.tolist() if not requests.stalled[s]))
        if preempted:
            return "a request was preempted in this turn, so no request is admitted"
        if len(running) == limits.rows:
            return f"all {limits.rows} rows are taken"
        if requests.entry[slot, WORD_BEST_EFFORT] and counts[S.YIELDED_TURNS]:
            return f"{YIELDS}, and the limit of overtakings is reached"
        size = int(self._turn.planned[:, 1].sum())
        if wanted > size or size in (limits.tokens, limits.burst_step_tokens, limits.mixed_tokens):
            return f"the step's budget of {size} tokens is taken"
        hits = int(requests.hit_tokens[slot]) >> limits.page_shift
        need = -(-int(requests.length[slot]) // limits.page_size) - hits
        kept = min(len(running), limits.pages >> WATERMARK_SHIFT)
        there = int(counts[S.FREE_COUNT] + counts[S.CACHED_COUNT])
        hit = f" in addition to {hits} cached ones" if hits else ""
        held_back = f"{kept} of them kept for running requests"
        return f"pages: it needs {need}{hit}; {there} are free or cached, {held_back}"
