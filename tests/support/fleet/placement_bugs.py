"""Bugs on purpose in placement: each must be found by the storm of plain_placement. A patch that no longer fits is an error."""

from support.seeded_bugs import Bug

# fmt: off
PLACEMENT_BUGS = tuple(Bug(what, module, before, after) for module, bugs in {
    "prefix_record": [
        ("the salt of a prompt is not compared",
         'return salt.to_bytes(SALT_BYTES, "little") + ', "return bytes(SALT_BYTES) + "),
        ("an engine that knows the first page counts as one that knows nothing",
         "            if child is None:\n                found", "            if child is not None:\n                found"),
        ("beginnings of the same length count as the same", "or not prompt.startswith(edge):", "or False:"),
        ("a beginning is taken for that of another length", "if len(edge) == start:", "if start:"),
        ("what follows a common beginning is overlooked", "if then in child.children:", "if False:"),
        ("a prompt is added behind no beginning",
         "prompt, key, child, start, then\n", "prompt, key, record._root, 0, then\n"),
        ("a prompt that leaves an edge is taken for the whole edge",
         "more = self._common(edge, prompt, at, end)", "more = len(edge) // page"),
        ("a prompt is looked at beyond its end", "if at + len(edge) > end or not prompt", "if not prompt"),
        ("a prompt is added where another one's match ended", "found[0] is prompt and found[1] is key", "found[0] is not None"),
        ("a prompt is added where its match ended before", "found, self._found = self._found, None", "found = self._found"),
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
        ("the last page of a common part is overlooked",
         "end - at) // page\n        while", "end - at) // page - 1\n        while"),
    ],
    "placement": [
        ("an engine that accepts nothing is chosen", "[load for load in loads if load.accepts]", "list(loads)"),
        ("a whole prompt counts as cached", "(len(prompt) - 1) // page", "len(prompt) // page"),
        ("what a restarted engine had is remembered", "self._records[engine].clear()", "pass"),
        ("all engines count as one", "self._records[engine].add(", "self._records[0].add("),
        ("what an engine has seen is counted as unseen", "unseen[index] = 0", "unseen[index] += 0"),
        ("what an engine published is not kept", "            seen[index] = load", "            seen[index] = before or load"),
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
