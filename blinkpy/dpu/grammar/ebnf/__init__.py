"""Grammars of rules, in the EBNF of llama.cpp and xgrammar, as far as they are regular."""
