"""Automata of single grammars. All functions raise GrammarError, as automaton_of_grammar does."""

from typing import Any

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.queues.byte_automaton import ByteAutomaton


def automaton_of_schema(schema: Any) -> ByteAutomaton:
    """The values that a JSON Schema allows."""
    return automaton_of_grammar({"schema": schema})


def automaton_of_regex(regex: str) -> ByteAutomaton:
    """Texts that a regular expression matches as a whole."""
    return automaton_of_grammar({"regex": regex})


def automaton_of_texts(texts: list[str]) -> ByteAutomaton:
    """One of the texts."""
    return automaton_of_grammar({"choice": texts})
