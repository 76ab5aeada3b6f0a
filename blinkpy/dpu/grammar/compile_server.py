"""The process that compiles grammars, by blinkpy.dpu.fork_server.forked_jobs.

Standard input gives the limits of each job, CPU seconds and bytes of memory, then the maximum digits of numbers, and
whether automata have distances. A job is a grammar as JSON. The first byte of the answer is its kind:

ANSWER: the packed automaton
REFUSAL: JSON with message, path, keyword and part
EXHAUSTED: out of memory
FAILURE: the traceback of an internal error
"""

import json
import sys
import traceback
from functools import partial

import orjson

from blinkpy.dpu.fork_server.forked_jobs import ForkBudget, serve_jobs
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.string_rules import FORMATS, SHORT_FORMATS, format_automaton

ANSWER, REFUSAL, FAILURE, EXHAUSTED = b"\1", b"\0", b"\2", b"\3"
BRIEF_S = 0.1


def compiled(digits: int, closes: bool, grammar: bytes) -> bytes:
    """The answer to a job."""
    try:
        return ANSWER + automaton_of_grammar(orjson.loads(grammar), digits, closes).words().tobytes()
    except MemoryError:
        return EXHAUSTED
    except RecursionError:
        refusal: GrammarError = GrammarTooLargeError("The grammar is nested too deeply: reduce its depth.")
    except GrammarError as error:
        refusal = error
    except Exception:
        return FAILURE + traceback.format_exc().encode()
    return REFUSAL + orjson.dumps([refusal.message, refusal.path, refusal.keyword, refusal.part])


WARM_UP = {
    "schema": {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"], "maxLength": 9},
            "b": {"type": "number"},
            "c": {"type": "integer"},
            "d": {"type": "array", "items": {"type": "boolean"}},
            "e": {"enum": ["one", "two"]},
        },
        "required": ["a", "c"],
    }
}


def prepare() -> None:
    """Fill the caches, which each fork inherits."""
    for name in FORMATS:
        for form in range(1 + len(SHORT_FORMATS.get(name, ()))):
            format_automaton(name, form)


if __name__ == "__main__":
    prepare()
    cpu_s, memory_bytes, number_digits, with_distances = json.load(sys.stdin)
    work = partial(compiled, number_digits, with_distances)
    warm_up = orjson.dumps(WARM_UP)
    work(warm_up)
    serve_jobs(int(sys.argv[1]), work, ForkBudget(cpu_s, memory_bytes, BRIEF_S), warm=partial(work, warm_up))
