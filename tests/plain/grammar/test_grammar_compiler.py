"""Grammars compiled in other processes: limits, deaths, cached grammars, and their owners."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_texts
from support.waiting import wait_for

from blinkpy.dpu.admission.gate import Asker
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fork_server.forked_jobs import NICENESS, SPARE_NAME
from blinkpy.dpu.grammar import grammar_compiler
from blinkpy.dpu.grammar.compile_server import ANSWER, BRIEF_S
from blinkpy.dpu.grammar.grammar_compiler import GrammarBusyError, GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.queues.byte_automaton import ByteAutomaton

SLOW = {"sequence": [{"regex": f"(a|b)*a(a|b){{10}}c{number}"} for number in range(200)]}  # many seconds

MOST_NICE = 19  # the kernel's limits
ASKER = Asker("tenant")


def memory_of(automaton: ByteAutomaton) -> int:
    """Bytes of all that its arrays keep alive."""
    owners: dict[int, int] = {}
    for array in (automaton.class_of, automaton.next_state, automaton.accepting, automaton.words()):
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        owners[id(owner)] = owner.nbytes
    return sum(owners.values())


def run(
    work: Callable[[GrammarCompiler], Awaitable[None]],
    compile_s: float = 20.0,
    compile_bytes: int = 128 << 20,
    cache_bytes: int = 1 << 20,
) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(compile_s, compile_bytes, cache_bytes)
        try:
            await work(compiler)
        finally:
            compiler.close()

    asyncio.run(main())


def nice_of(session: int, spare: bool = False) -> dict[int, int]:
    """Niceness of the processes of a session that are not dead: without its spare fork, or of this alone."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            name, _, rest = path.read_text().rpartition(")")
            state, _, _, owner, *more = rest.split()
            if int(owner) == session and state != "Z" and name.endswith(SPARE_NAME.decode()) == spare:
                found[int(path.parent.name)] = int(more[12])
    return found


def wait_until_idle(server: int) -> None:
    """Until no job runs, and a fork is ready for the next one."""
    wait_for(lambda: list(nice_of(server)) == [server] and len(nice_of(server, spare=True)) == 1)


def computed(pid: int) -> float:
    """CPU time of a process, s; 0 after its end."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def choices(*texts: str) -> dict[str, list[str]]:
    return {"choice": list(texts)}


def test_concurrent_requests_compile_a_grammar_once() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        first, *others = await asyncio.gather(*(compiler.automaton(choices("a", "b"), ASKER) for _ in range(5)))
        assert all(other is first for other in others)
        assert await compiler.automaton(choices("a", "b"), ASKER) is first
        assert first.digest == automaton_of_texts(["a", "b"]).digest

    run(work)


def test_a_cancelled_waiter_does_not_cancel_the_compilation() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        leaving = asyncio.create_task(compiler.automaton(choices("a"), ASKER))
        staying = asyncio.create_task(compiler.automaton(choices("a"), ASKER))
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert (await staying).accepts(b"a")

    run(work)


def test_a_compile_ends_with_the_last_client_that_waits_for_it() -> None:
    """Clients that disconnect hold no place: grammars of other clients are compiled immediately."""

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        server = compiler._forks.process
        assert server is not None
        wait_until_idle(server.pid)
        leaving = [
            asyncio.create_task(compiler.automaton({"sequence": [*SLOW["sequence"], {"regex": f"x{i}"}]}, ASKER))
            for i in range(grammar_compiler.MOST_WAITING)
        ]
        wait = asyncio.get_running_loop().time() + 60
        while len(nice_of(server.pid)) < 1 + grammar_compiler.OF_ONE:
            assert asyncio.get_running_loop().time() < wait
            await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.sleep(0)
        assert (await compiler.automaton(choices("b"), ASKER)).accepts(b"b")
        assert (compiler._compiling, compiler._places.waiting) == ({}, 0)
        wait_until_idle(server.pid)

    run(work, compile_s=60.0)


def test_compiles_that_run_side_by_side_have_a_lower_priority() -> None:
    """From their start: clients that disconnect immediately and ask again slow no event loop down."""

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        server = compiler._forks.process
        assert server is not None
        wait_until_idle(server.pid)
        own = nice_of(server.pid)[server.pid]
        first = asyncio.create_task(compiler.automaton(SLOW, ASKER))
        wait, loop = asyncio.get_running_loop().time() + 60, asyncio.get_running_loop()
        while len(nice_of(server.pid)) < 2:
            assert loop.time() < wait
            await asyncio.sleep(0.001)
        (alone,) = set(nice_of(server.pid)) - {server.pid}
        others = [
            asyncio.create_task(compiler.automaton({"sequence": [*SLOW["sequence"], {"regex": f"x{i}"}]}, ASKER))
            for i in range(grammar_compiler.OF_ONE - 1)
        ]
        while len(seen := nice_of(server.pid)) < 1 + grammar_compiler.OF_ONE:
            assert loop.time() < wait
            await asyncio.sleep(0.001)
        beside = {pid: nice for pid, nice in seen.items() if pid not in (server.pid, alone)}
        while not all(nice == min(own + NICENESS, MOST_NICE) for nice in beside.values()):
            for pid in beside:  # a fork that has computed for less than BRIEF_S steps back for this reason alone
                assert computed(pid) < BRIEF_S / 2, "it has not stepped back at its start"
            await asyncio.sleep(0.001)
            beside = {pid: nice for pid, nice in nice_of(server.pid).items() if pid in beside}
        for task in (first, *others):
            task.cancel()
        await asyncio.gather(first, *others, return_exceptions=True)

    run(work, compile_s=60.0)


def test_a_tenant_leaves_another_its_half_of_the_compiles(rng: np.random.Generator) -> None:
    """A greedy tenant's compiles take any time, and its clients leave at any time; another tenant always has compiles waiting. In
    simulated time, its compiles get at least 45 % of the time of all compiles."""
    served = {"greedy": 0, "modest": 0}  # ticks of compiles that ran
    answer = ANSWER + automaton_of_texts(["a"]).words().tobytes()

    async def work(compiler: GrammarCompiler) -> None:
        running = dict[asyncio.Future[bytes], tuple[str, int]]()  # its tenant, and the tick at which it ends
        tick = 0

        async def fork(content: bytes) -> bytes:
            tenant = "greedy" if b"greedy" in content else "modest"
            done = asyncio.get_running_loop().create_future()
            running[done] = tenant, tick + int(rng.integers(1, 200 if tenant == "greedy" else 20))
            try:
                return await done
            finally:
                running.pop(done, None)

        compiler._forks.run = fork  # type: ignore[assignment,method-assign]
        asked = {"greedy": list[asyncio.Task[Any]](), "modest": list[asyncio.Task[Any]]()}
        for tick in range(1000):
            for tenant, tasks in asked.items():
                ended = [task for task in tasks if task.done()]
                await asyncio.gather(*ended, return_exceptions=True)
                tasks[:] = [task for task in tasks if task not in ended]
                wanted = 70 if tenant == "greedy" else 12
                for number in range(wanted - len(tasks)):
                    grammar = choices(f"{tenant} {tick} {number}")
                    tasks.append(asyncio.create_task(compiler.automaton(grammar, Asker(tenant))))
            if rng.random() < 0.3:
                for task in asked["greedy"][: int(rng.integers(1, 60))]:
                    task.cancel()
            for _ in range(4):
                await asyncio.sleep(0)
            for done, (tenant, end) in list(running.items()):
                served[tenant] += 1
                if tick >= end and not done.done():
                    done.set_result(answer)
        for task in (*asked["greedy"], *asked["modest"]):
            task.cancel()
        await asyncio.gather(*asked["greedy"], *asked["modest"], return_exceptions=True)

    run(work)
    assert served["modest"] >= 0.45 * sum(served.values()), served


def test_a_tenant_with_any_number_of_slow_grammars_leaves_others_their_places() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        slow = [
            asyncio.create_task(compiler.automaton({"sequence": [*SLOW["sequence"], {"regex": f"x{i}"}]}, ASKER))
            for i in range(grammar_compiler.MOST_WAITING)
        ]
        await asyncio.sleep(0.01)
        assert (await compiler.automaton(choices("b"), Asker("another"))).accepts(b"b")
        refused = [task for task in slow if task.done()]
        assert len(refused) == 1, "the line was full: the newest of the one with most gave way"
        with pytest.raises(GrammarBusyError):
            await refused[0]
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    run(work, compile_s=60.0)


def test_refusals_come_with_their_place_and_are_kept() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for _ in range(2):
            with pytest.raises(GrammarError) as refused:
                await compiler.automaton({"schema": {"items": {"uniqueItems": True}}}, ASKER)
            assert (refused.value.path, refused.value.keyword) == ("#/items", "uniqueItems")
        assert len(compiler._cache) == 1

    run(work)


def test_a_fault_of_ours_is_no_refusal() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        with pytest.raises(RuntimeError, match="KeyError"):
            await compiler.automaton({"unknown": 1}, ASKER)

    run(work)


def test_what_is_too_long_or_too_deep_is_not_sent() -> None:
    deep: dict[str, object] = {}
    for _ in range(600):
        deep = {"items": deep}

    async def work(compiler: GrammarCompiler) -> None:
        for grammar, why in ((choices("x" * (1 << 20)), "bytes as JSON"), ({"schema": deep}, "too deep")):
            with pytest.raises(GrammarError, match=why):
                await compiler.automaton(grammar, ASKER)
        assert compiler._forks.process is None

    run(work)


def test_a_compilation_past_its_deadline_is_killed() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        server = compiler._forks.process
        assert server is not None
        wait_until_idle(server.pid)
        behind = min(nice_of(server.pid)[server.pid] + NICENESS, MOST_NICE)  # the tests may run with nice themselves
        seen = 0
        for _ in range(10):  # it is not kept: another time it may be faster
            asked = asyncio.create_task(compiler.automaton(SLOW, ASKER))
            while not any(nice == behind for pid, nice in nice_of(server.pid).items() if pid != server.pid):
                if asked.done():  # it has not stepped back, or the test looked too late
                    break
                await asyncio.sleep(0.005)
            seen += not asked.done()
            with pytest.raises(GrammarError, match="too long"):
                await asked
            wait_until_idle(server.pid)  # the fork ends by itself
            if seen == 2:
                return
        raise AssertionError("it has not stepped back")

    run(work, compile_s=1.0)


def test_the_next_one_is_compiled_after_a_death() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        assert (await compiler.automaton(choices("a"), ASKER)).accepts(b"a")
        server = compiler._forks.process
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.poll() is not None)
        assert (await compiler.automaton(choices("b"), ASKER)).accepts(b"b")

    run(work)


def test_a_job_that_the_kernel_kills_runs_once_more() -> None:
    """As it does when memory runs out. After a second time the client may try later: the grammar is not at fault."""

    async def killed(server: int, before: set[int]) -> set[int]:
        wait = asyncio.get_running_loop().time() + 60
        while not (forks := set(nice_of(server)) - {server} - before):
            assert asyncio.get_running_loop().time() < wait
            await asyncio.sleep(0.002)
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        return forks

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        server = compiler._forks.process
        assert server is not None
        wait_until_idle(server.pid)  # else the fork that has answered is killed
        asked = asyncio.create_task(compiler.automaton(SLOW, ASKER))
        first = await killed(server.pid, set())
        assert await killed(server.pid, first)
        with pytest.raises(ApiError, match="memory") as caught:
            await asked
        assert (caught.value.status, caught.value.code) == (503, "out_of_resources")
        assert (await compiler.automaton(choices("b"), ASKER)).accepts(b"b")

    run(work, compile_s=60.0)


def test_a_job_whose_server_dies_before_it_begins_runs_in_the_next_one() -> None:
    """A grammar without an answer is not a grammar that takes too long."""

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        server = compiler._forks.process
        assert server is not None
        wait_until_idle(server.pid)
        os.kill(server.pid, signal.SIGSTOP)
        asked = asyncio.create_task(compiler.automaton(choices("b"), ASKER))
        await asyncio.sleep(0.05)  # until it is sent
        os.kill(server.pid, signal.SIGKILL)
        assert (await asked).accepts(b"b")

    run(work)


def test_a_fork_is_ready_for_the_next_job() -> None:
    """It takes the job; a new one follows after the job. If it dies, the next job forks, and no fork is made until then."""

    async def work(compiler: GrammarCompiler) -> None:
        compiler.start()
        server = compiler._forks.process
        assert server is not None

        def spare() -> int:
            wait_for(lambda: len(nice_of(server.pid, spare=True)) == 1)
            return next(iter(nice_of(server.pid, spare=True)))

        before = spare()
        asked = asyncio.create_task(compiler.automaton(SLOW, ASKER))
        while before not in nice_of(server.pid):  # it has taken the job
            assert not asked.done()
            await asyncio.sleep(0.002)
        assert not nice_of(server.pid, spare=True)
        asked.cancel()
        after = spare()
        assert after != before
        os.kill(after, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{after}").exists())
        await asyncio.sleep(0.2)
        assert not nice_of(server.pid, spare=True)
        assert (await compiler.automaton(choices("b"), ASKER)).accepts(b"b")
        last = spare()
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{last}").exists())

    run(work, compile_s=60.0)


def test_a_server_that_is_closed_starts_no_other_one() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        asked = asyncio.create_task(compiler.automaton(SLOW, ASKER))
        await asyncio.sleep(0.05)
        compiler._forks.close()
        with pytest.raises(GrammarError, match="too long"):
            await asked
        assert compiler._forks.process is None

    run(work)


def test_without_descriptors_a_compile_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.automaton(choices("a"), ASKER)
        running = asyncio.create_task(compiler.automaton(SLOW, ASKER))
        await asyncio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr("socket.socketpair", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
            with pytest.raises(ApiError) as caught:
                await compiler.automaton(choices("b"), ASKER)
        assert caught.value.status == 503
        assert not running.done(), "what runs goes on"
        running.cancel()
        assert (await compiler.automaton(choices("b"), ASKER)).accepts(b"b")

    run(work, compile_s=60.0)


def test_too_many_at_once_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MOST_WAITING", 3)

    async def work(compiler: GrammarCompiler) -> None:
        waiting = [asyncio.create_task(compiler.automaton(choices(text), ASKER)) for text in "abc"]
        await asyncio.sleep(0)
        with pytest.raises(GrammarBusyError):
            await compiler.automaton(choices("d"), ASKER)
        assert len(await asyncio.gather(*waiting)) == 3
        assert (await compiler.automaton(choices("d"), ASKER)).accepts(b"d")

    run(work)


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        used = await compiler.automaton(choices("used"), ASKER)
        for number in range(12):
            await compiler.automaton(choices(f"text {number}"), ASKER)
            assert await compiler.automaton(choices("used"), ASKER) is used
            assert compiler._cached_bytes <= compiler.cache_bytes
        assert compiler._cached_bytes == sum(
            memory_of(kept) for kept in compiler._cache.values() if isinstance(kept, ByteAutomaton)
        )
        assert len(compiler._cache) < 12

    run(work, cache_bytes=6000)


def test_processes_end_with_their_parent() -> None:
    pid = 0

    async def work(compiler: GrammarCompiler) -> None:
        nonlocal pid
        await compiler.automaton(choices("a"), ASKER)
        assert compiler._forks.process is not None
        pid = compiler._forks.process.pid

    run(work)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
