"""The process that compiles grammars, by blinkpy.dpu.fork_server.forked_jobs.

A job is a grammar as JSON. The answer begins with a byte: ANSWER with the packed automaton; REFUSAL with JSON: message, path,
keyword and part; EXHAUSTED, where its memory did not suffice; or FAILURE, for a fault of ours, with its traceback. What is read
from standard input: CPU seconds and bytes of memory for each, the limit of digits of numbers, and whether automata have
distances.
"""

import json
import sys
import traceback
from functools import partial

import orjson

from blinkpy.dpu.fork_server.forked_jobs import ForkBudget, serve_jobs
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.string_rules import FORMATS, format_automaton

ANSWER, REFUSAL, FAILURE, EXHAUSTED = b"\1", b"\0", b"\2", b"\3"
BRIEF_S = 0.1


def compiled(digits: int, closes: bool, grammar: bytes) -> bytes:
    """The answer to a job."""
    try:
        return ANSWER + automaton_of_grammar(orjson.loads(grammar), digits, closes).words().tobytes()
    except MemoryError:
        return EXHAUSTED
    except RecursionError:
        refusal: GrammarError = GrammarTooLargeError("The grammar is too deep.")
    except GrammarError as error:
        refusal = error
    except Exception:
        return FAILURE + traceback.format_exc().encode()
    return REFUSAL + orjson.dumps([refusal.message, refusal.path, refusal.keyword, refusal.part])


if __name__ == "__main__":
    for name in FORMATS:
        format_automaton(name)  # kept, and so in each fork
    cpu_s, memory_bytes, number_digits, with_distances = json.load(sys.stdin)
    serve_jobs(int(sys.argv[1]), partial(compiled, number_digits, with_distances), ForkBudget(cpu_s, memory_bytes, BRIEF_S))
