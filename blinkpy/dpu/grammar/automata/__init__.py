"""From nondeterministic automata over bytes to minimal ones."""
