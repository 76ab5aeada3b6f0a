"""Compiles grammars outside the event loop, in other processes, and caches them by content."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import orjson

from blinkpy.dpu.admission.gate import Asker, FullError, Places
from blinkpy.dpu.fork_server.fork_server import ForkServer
from blinkpy.dpu.grammar.compile_grammar import Grammar
from blinkpy.dpu.grammar.compile_server import ANSWER, EXHAUSTED, FAILURE
from blinkpy.dpu.grammar.grammar_errors import (
    GrammarError,
    GrammarTooHeavyError,
    GrammarTooLargeError,
    GrammarTooSlowError,
    located,
)
from blinkpy.dpu.grammar.number_ranges import DIGITS
from blinkpy.queues.byte_automaton import ByteAutomaton

SERVER = "blinkpy.dpu.grammar.compile_server"
MOST_CONTENT = 1 << 20  # bytes of a grammar, as JSON
AT_ONCE, OF_ONE = 8, 4  # maximum concurrent compiles, in total and per tenant
MOST_WAITING = 64  # grammars that wait or compile
MARGIN_S = 10.0  # time beyond compile_s for a process to start and to get its CPU time
REFUSAL_BYTES = 1024  # memory of an entry in the cache


class GrammarBusyError(Exception):
    """Too many grammars wait to be compiled."""


@dataclass(slots=True, eq=False)
class _Compiling:
    task: "asyncio.Task[ByteAutomaton | GrammarError]"
    waiters: int = 0


class GrammarCompiler:
    """Automata of grammars.

    compile_s, compile_bytes: limits of CPU time, s, and of memory, bytes, for one compile.
    cache_bytes: memory for cached automata and refusals; the least recently used entries are evicted.
    digits: the maximum digits of a number before the point, and after it.
    closes: see ByteAutomaton.
    """

    def __init__(self, compile_s: float, compile_bytes: int, cache_bytes: int, digits: int = DIGITS, closes: bool = True) -> None:
        self.compile_s, self.cache_bytes = compile_s, cache_bytes
        self._cache: OrderedDict[bytes, ByteAutomaton | GrammarError] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[tuple[str, bytes], _Compiling] = {}  # by asker and key
        self._places = Places(AT_ONCE, MOST_WAITING, of_one=OF_ONE)
        self._forks = ForkServer(SERVER, (compile_s, compile_bytes, digits, closes), compile_s + MARGIN_S)

    def start(self) -> None:
        """Start the process now."""
        self._forks.start()

    def close(self) -> None:
        """End the processes."""
        for compiling in self._compiling.values():
            compiling.task.cancel()
        self._forks.close()

    async def automaton(self, grammar: Grammar, asker: Asker) -> ByteAutomaton:
        """The grammar's automaton. A compile is cancelled when all its callers are cancelled.

        Raises GrammarError, GrammarBusyError if too many grammars wait, and RuntimeError for a fault of the compiler.
        """
        content = _content(grammar)
        key = hashlib.sha256(content).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
        else:
            found = await self._compiled(key, content, asker)
        if isinstance(found, GrammarError):
            error = type(found)(found.message, found.path, found.keyword, found.part)
            raise located(grammar, error) if isinstance(error, GrammarTooLargeError) else error
        return found

    async def _compiled(self, key: bytes, content: bytes, asker: Asker) -> ByteAutomaton | GrammarError:
        """Join a running compile of the same tenant, or begin one."""
        name = asker.name, key
        compiling = self._compiling.get(name)
        if compiling is None:
            task = asyncio.get_running_loop().create_task(self._compile(key, content, asker))
            compiling = self._compiling[name] = _Compiling(task)
        compiling.waiters += 1
        try:
            return await asyncio.shield(compiling.task)
        finally:
            compiling.waiters -= 1
            if not compiling.waiters and self._compiling.get(name) is compiling:
                del self._compiling[name]
                compiling.task.cancel()

    async def _compile(self, key: bytes, content: bytes, asker: Asker) -> ByteAutomaton | GrammarError:
        try:
            async with self._places.place(asker):
                result = self._cache.get(key) or await self._ask(content)  # a compile for another tenant may have ended meanwhile
        except FullError:
            raise GrammarBusyError from None
        if result is not _TOO_LONG:  # not cached, since a retry may succeed
            self._keep(key, result)
        return result

    def _keep(self, key: bytes, result: ByteAutomaton | GrammarError) -> None:
        if key in self._cache:
            return
        self._cache[key] = result
        self._cached_bytes += _size(result)
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])

    async def _ask(self, content: bytes) -> ByteAutomaton | GrammarError:
        """Compile a grammar in a separate process. content: its JSON."""
        began = time.monotonic()
        answer = await self._forks.run(content)
        if not answer:
            if time.monotonic() - began >= self.compile_s + MARGIN_S:  # it did not get its CPU time, since the machine is busy
                raise GrammarBusyError
            return _TOO_LONG
        if answer[:1] == ANSWER:
            return ByteAutomaton.of_words(np.frombuffer(answer[1:], np.int32))
        if answer[:1] == EXHAUSTED:
            return GrammarTooHeavyError("The grammar takes too much memory to compile: simplify it.")
        if answer[:1] == FAILURE:
            raise RuntimeError(f"the grammar compiler failed:\n{answer[1:].decode()}")
        return GrammarError(*orjson.loads(answer[1:]))


_TOO_LONG = GrammarTooSlowError("The grammar takes too long to compile: simplify it.")


def _content(grammar: Grammar) -> bytes:
    """The grammar as JSON. Raises GrammarTooLargeError."""
    try:
        content = orjson.dumps(grammar)
    except orjson.JSONEncodeError as error:  # the JSON is nested deeper than this
        raise GrammarTooLargeError("The grammar is nested too deeply: reduce its depth.") from error
    if len(content) > MOST_CONTENT:
        raise GrammarTooLargeError(f"The grammar has {len(content)} bytes as JSON; the limit is {MOST_CONTENT}.")
    return content


def _size(result: ByteAutomaton | GrammarError) -> int:
    return result.nbytes if isinstance(result, ByteAutomaton) else REFUSAL_BYTES
