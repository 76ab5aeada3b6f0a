"""Bugs on purpose in placement: each must be found by the storm of plain_placement. A patch that no longer fits is an error."""

from support.seeded_bugs import Bug

# fmt: off
PLACEMENT_BUGS = tuple(Bug(what, module, before, after) for module, bugs in {
    "prefix_record": [
        ("the salt of a prompt is not compared",
         'return salt.to_bytes(SALT_BYTES, "little") + ', "return bytes(SALT_BYTES) + "),
        ("a prompt that leaves an edge is taken for the whole edge",
         "return at // page + self._common(edge, prompt, at)", "return (at + len(edge)) // page"),
        ("the rest of an edge counts as used with its beginning",
         "node = self._split(child, common)", "self._split(child, common)"),
        ("the beginning of a prompt is older than its end",
         "        while node.parent is not None:\n            used(node)\n            node = node.parent\n",
         "        path = []\n        while node.parent is not None:\n            path.append(node)\n"
         "            node = node.parent\n        for node in reversed(path):\n            used(node)\n"),
        ("pages behind a split hang on the wrong one", "upper.children[node.key] = node", "parent.children[node.key] = node"),
        ("a record keeps a page too many", "while self.pages > self._most:", "while self.pages > self._most + 1:"),
        ("pages are counted twice", "self.pages += (end - at) // page", "self.pages += 2 * (end - at) // page"),
        ("what is used again stays old", "            used(node)\n", ""),
        ("the last page of a common part is overlooked", "len(prompt) - at) // page\n", "len(prompt) - at) // page - 1\n"),
    ],
    "placement": [
        ("an engine that accepts nothing is chosen", "[load for load in loads if load.accepts]", "list(loads)"),
        ("a whole prompt counts as cached", "text if length % page else", "text if length else"),
        ("what a restarted engine had is remembered", "self._records[engine].clear()", "pass"),
        ("all engines count as one", "self._records[engine].add(", "self._records[0].add("),
        ("what an engine has seen is counted as unseen", "] = published, 0", "] = published, self._unseen[load.index]"),
        ("the prompt before is recorded", "if prompt is not self._last or salt", "if self._last is None or salt"),
    ],
    "placement_rules": [
        ("a busy engine gets its prompts whatever it has to do", "> EXTRA_TOKENS:", "> 1 << 40:"),
        ("prompts go where they wait for longer than they save",
         "return best if later <= saved else", "return best if later >= 0 else"),
        ("what was just sent does not count", " + request.unseen[best.index]", ""),
        ("the shortest prefix is looked for", "most = max([", "most = min(["),
        ("waiting prompts are not seen", " + engine.waiting_tokens", ""),
        ("the busiest engine counts as the least loaded", "least = min(works)", "least = max(works)"),
    ],
}.items() for what, before, after in bugs)
# fmt: on
