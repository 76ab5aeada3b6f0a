"""Bugs planted in the moves of choices between engines: the storm of support.front_end.fleet_storm must find each."""

from support.seeded_bugs import SCHEDULER_BUGS, Bug

# fmt: off
PATCHES: dict[str, list[tuple[str, str, str]]] = {
    "moves": [
        ("max_tokens begins anew in another engine", "max_tokens=sampling.max_tokens - count", "max_tokens=sampling.max_tokens"),
        ("min_tokens begins anew in another engine",
         "min_tokens=max(0, sampling.min_tokens - count)", "min_tokens=sampling.min_tokens"),
        ("the last token is computed twice", "np.array(flight.output, np.int32)]", "np.array(flight.output[:-1], np.int32)]"),
        ("a grammar begins anew in another engine",
         "grammar = started_at(grammar, _position_after(grammar, flight.output, pieces()))",
         "_position_after(grammar, [], pieces())"),
        ("a counted string begins anew in another engine", "start=position)", "start=position % 65536)"),
        ("penalties and banned sequences forget the output", "        output_tokens=count,\n", ""),
        ("penalties and banned sequences count a token of the prompt", "output_tokens=count", "output_tokens=count + 1"),
        ("scores of a prompt are counted twice", "            generation.scores.restart()\n", "            pass\n"),
        ("a prompt is scored again with its output",
         "flags=sampling.flags & ~SUBMIT_SCORE_PROMPT,\n", "flags=sampling.flags,\n"),
        ("text that may be the begin of a stop string is shown at a move", "    assert flight is not None\n    sampling, count",
         "    assert flight is not None\n    stops = generation._stops\n    generation._text += stops.finish() if stops else ''\n"
         "    sampling, count"),
        ("moves are not counted", "flight.moves += 1", "flight.moves += 0"),
        ("a move that its engine refuses counts as one",
         "        except ApiError:  # the", "        except ApiError:\n            flight.moves += 1  # the"),
        ("pauses of several moves do not add up", "flight.paused_s += pause_s", "flight.paused_s = pause_s"),
        ("who has left moves on", "if move.generation.open and not self._settle(move):", "if not self._settle(move):"),
        ("a request moves in the middle of a step's tokens",
         "        self._plan(0.0)\n\n    def", "        self._move_all()\n\n    def"),
    ],
    "generation": [
        ("ranks of a prompt's tokens are counted twice", "del self.entries[1:], self.ranks[1:]", "del self.entries[1:]"),
        ("output counts as cached tokens of the prompt", "else min(cached, self.prompt_length)", "else cached"),
    ],
    "token_feed": [
        ("a score is taken for output",
         "if flags & HAS_TOKEN and flight.scores_due:", "if flags & HAS_TOKEN and flight.scores_due < 0:"),
    ],
    "engine_load": [
        ("tokens stay outstanding in an engine that was lost",
         "        self.outstanding = self.unseen = 0\n        self.read_at = 0.0\n",
         "        self.unseen = 0\n        self.read_at = 0.0\n"),
    ],
    "engines": [
        ("an engine that leaves is let go with its requests", "link.removed and link.is_idle()", "link.removed"),
        ("places of engines that left are not used again", "            if free:\n", "            if False:\n"),
        ("an engine that comes back while it leaves goes on leaving",
         "link.removed = link", "link.removed = link.removed or link"),
        ("a placement knows nothing of an engine that came later", "self._placement.grow(len(self._all))", "pass"),
        ("each engine draws a seed of its own", "seed=secrets.randbits(63)", "seed=None"),
        ("who waits is refused when one engine of several is lost",
         "        if self.pair is None:\n            self.on_failure", "        if True:\n            self.on_failure"),
        ("who has lost an engine comes behind those who wait for a slot", "is None) - len(self.moves))", "is None))"),
        ("who finds no engine is forgotten",
         "engine is None:\n            return False\n", "engine is None:\n            return True\n"),
        ("choices of a request that was refused go on",
         "generation.open = False\n                self.cancel(generation)\n", "generation.open = False\n"),
    ],
    "engine_link": [
        ("phases are counted from the last engine on",
         "generation.submitted = generation.submitted or time", "generation.submitted = time"),
        ("what waits for space is lost with its engine",
         "for request in lost] + self._take_deferred()", "for request in lost]"),
    ],
}
# fmt: on
FLEET_BUGS = tuple(Bug(what, module, *patch) for module, patches in PATCHES.items() for what, *patch in patches)

_BETWEEN_SCHEDULERS = (
    *("max_tokens begins anew", "min_tokens begins anew", "the last token is computed twice", "a grammar begins anew"),
    *(
        "a grammar leads back",
        "penalties and banned sequences count a token",
        "tokens stay outstanding",
        "each engine draws a seed",
    ),
    *("moves are not counted", "who finds no engine"),
)
WORLD_BUGS = (
    *(bug for bug in FLEET_BUGS if bug.what.startswith(_BETWEEN_SCHEDULERS)),
    Bug("what a lost engine had goes nowhere", "engine_link",
        "back = [request.owner for request in lost] + self._take_deferred()", "back = self._take_deferred()"),
    Bug("a new owner begins before the completions of its own epoch", "queue_pair",
        "self._reset(words.sq_head, words.cq_tail)", "self._reset(words.sq_head, max(0, words.cq_tail - 1))"),
    *(bug for bug in SCHEDULER_BUGS
      if bug.what in ("a head of an earlier epoch is accepted", "a grant begins at the wrong completion",
                      "a claim of any epoch is granted")),
)  # fmt: skip
"""Bugs that tests/support/front_end/scheduler_storm.py must find, in the fleet and in the modules that it uses."""
