"""From JSON schemas, regular expressions and choices to byte automata."""
