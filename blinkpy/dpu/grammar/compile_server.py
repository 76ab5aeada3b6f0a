"""The process that compiles grammars: it forks for each of them, so that none can take another one's time or memory.

It gets jobs from a socket, one byte and an open file each: the job's own socket. The fork reads the grammar from that, as JSON up
to the end, and answers a byte: ANSWER with the packed automaton; REFUSAL with JSON: message, path and keyword; or FAILURE, for a
fault of ours, with its traceback. It ends without an answer when it takes too long. The process ends when its parent does, which
closes the socket.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback

import orjson

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.string_rules import FORMATS, format_automaton

ANSWER, REFUSAL, FAILURE = b"\1", b"\0", b"\2"
MEMORY_BYTES = 512 << 20  # of address space; the process itself has 115 MB
BRIEF_S, NICENESS = 0.1, 10  # what takes longer steps back behind the event loops on the same cores


def serve(control: socket.socket, compile_s: float) -> None:
    """Fork for each job until the parent is gone. compile_s: a job's CPU time, in seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    for name in FORMATS:
        format_automaton(name)  # kept, and so in each fork
    while True:
        order, files, _, _ = socket.recv_fds(control, 1, 1)
        if not order:
            return
        with socket.socket(fileno=files[0]) as job:
            if os.fork() == 0:
                try:
                    control.close()
                    # Of its own time, not the clock's: on a busy machine what is small is compiled all the same.
                    signal.signal(signal.SIGVTALRM, lambda *_: os.nice(NICENESS))
                    signal.setitimer(signal.ITIMER_VIRTUAL, BRIEF_S)
                    signal.setitimer(signal.ITIMER_PROF, compile_s)  # its signal ends the fork
                    with contextlib.suppress(ConnectionError):
                        job.sendall(_answer(_read(job)))
                finally:
                    os._exit(0)


def _read(job: socket.socket) -> bytes:
    with job.makefile("rb") as source:
        return source.read()


def _answer(grammar: bytes) -> bytes:
    try:
        return ANSWER + automaton_of_grammar(orjson.loads(grammar)).words().tobytes()
    except (MemoryError, RecursionError):
        refusal: GrammarError = GrammarTooLargeError("The grammar is too large, or too deep.")
    except GrammarError as error:
        refusal = error
    except Exception:
        return FAILURE + traceback.format_exc().encode()
    return REFUSAL + orjson.dumps([refusal.message, refusal.path, refusal.keyword])


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        serve(parent, float(sys.argv[2]))
