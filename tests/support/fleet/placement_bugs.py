"""Bugs on purpose in placement: each must be found by the storm of plain_placement. A patch that no longer fits is an error."""

from support.seeded_bugs import Bug

# fmt: off
PLACEMENT_BUGS = tuple(Bug(what, module, before, after) for module, bugs in {
    "prefix_record": [
        ("the salt of a prompt is not compared", "node.children.get((salt, text[:page]))", "node.children.get((0, text[:page]))"),
        ("a prompt that leaves an edge is taken for the whole edge", "if text.startswith(edge, at):", "if True:"),
        ("the last page of a common part is overlooked", "len(edge) // page - 1", "max(1, len(edge) // page - 2)"),
        ("what is behind an edge is overlooked",
         "child = node.children.get(text[at : at + page])", "child = None"),
        ("whoever knows the first page knows all",
         "            for engine in node.used:\n", "            for engine in range(len(known)):\n"),
        ("a whole prompt counts as cached", "if len(text) == at > 0:", "if at < 0:"),
        ("a prompt is added where another one's match ended",
         "self._found[0] is not prompt or self._found[1] != salt", "False"),
        ("a prompt is added where its match ended before", "        self._found = None\n        if at", "        if at"),
        ("a prompt is added to what was forgotten", "self._found = 0, None", "_ = 0, None"),
        ("the rest of an edge counts as used with its beginning",
         "node = self._split(node, at // TOKEN_BYTES)", "self._split(node, at // TOKEN_BYTES)"),
        ("pages behind a split hang on the wrong one",
         "upper.children[node.key] = node", "upper.parent.children[node.key] = node"),
        ("only who splits an edge knows its beginning", "upper.used.update(node.used)", "pass"),
        ("pages that were used at different times become one",
         "len(node.children) == 1 and node.used == below.used", "len(node.children) == 1"),
        ("the beginning of two that become one is lost", "node.edge + below.edge", "below.edge"),
        ("a record keeps a page too many", "- self._most) > 0:", "- self._most) > 4:"),
        ("what others still know is cut", "if len(node.used) == 1:", "if True:"),
        ("all engines forget together", "            del node.used[engine]\n", "            node.used.clear()\n"),
        ("what others know is forgotten with an engine",
         "                if not node.used:\n                    del", "                if True:\n                    del"),
        ("pages are counted twice", "            if before is None:\n", "            if True:\n"),
        ("what is used again stays old",
         "            node.used[engine] = self._use\n", "            node.used.setdefault(engine, self._use)\n"),
        ("a use that another one has replaced still counts", "elif ends.get(before) is node:", "elif False:"),
        ("the beginning of a use is never forgotten", "if parent.used.get(engine) == use:", "if False:"),
    ],
    "placement": [
        ("an engine that accepts nothing is chosen", "[load for load in loads if load.accepts]", "list(loads)"),
        ("what a restarted engine had is remembered", "self._record.forget(engine)", "pass"),
        ("all engines count as one", "self._record.add(engine,", "self._record.add(0,"),
    ],
    "placement_rules": [
        ("a busy engine gets its prompts whatever it has to do", "> EXTRA_TOKENS:", "> 1 << 40:"),
        ("prompts go where they wait for longer than they save",
         "return best if later <= most - own else", "return best if later >= 0 else"),
        ("what was just sent does not count", " + best.unseen_tokens", ""),
        ("the shortest prefix is looked for", "if found > most:", "if found < most:"),
        ("of several that know as much only the first counts",
         "        elif found == most:\n            homes", "        elif found < 0:\n            homes"),
        ("waiting prompts are not seen",
         "tokens = engine.tokens_in_flight + engine.waiting_tokens", "tokens = engine.tokens_in_flight"),
        ("the busiest engine counts as the least loaded", "if tokens < least:", "if tokens > least or least == inf:"),
    ],
}.items() for what, before, after in bugs)
# fmt: on
