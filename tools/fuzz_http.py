"""Random requests to a server with the null engine: no 5xx, no hang, no leak. `make fuzz-http` runs it.

Valid requests are damaged as values, as JSON, as bytes and as HTTP (tools/damaged_requests.py). The seed
of each request is derived from the run's seed and the request's number. Failing requests are stored in
build/fuzz-http. With --schemathesis, a command, the run continues with requests generated from
/openapi.json. A connection counts as one request, even if it carries three.

A request fails with a status of 500 or more, or without an end after 20 s. The run fails if:
- the worker's memory grows by more than 64 MiB, or its open files by more than 8, after the first tenth
- the worker is replaced
- the server is not healthy and idle at the end, does not end in order, or logs a warning
"""

import asyncio
import contextlib
import multiprocessing
import re
import secrets
import shutil
import subprocess
import time
from collections import Counter
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import httpx
import uvloop
from damaged_requests import BODIES, Requests
from support.commands import Command

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from benchmarks.serving.attack_clients import STATUS
from benchmarks.serving.attack_shapes import FIELDS
from benchmarks.serving.process_memory import open_files, resident, worker_below

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
KEPT = Path("build/fuzz-http")
ANSWER_S = 0.2  # until a client considers its request incomplete, and half-closes
HANG_S = 20.0  # until an answer, or the end of a half-closed connection
LEAK_MIB, LEAK_FILES = 64, 8  # of a worker, over a run
WARM_SHARE = 0.1  # of a run, before its memory counts
LOOKS = 20  # measurements of the memory
REPORT_S = 30.0  # between two lines of progress
MOST_FAILURES = 20
LINES = 60  # of the log that are shown


class Clients:
    """Sends requests, and counts their outcomes. failures: (number, reason)."""

    def __init__(self, port: int, requests: Requests):
        self._port, self._requests = port, requests
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.failures: list[tuple[int, str]] = []

    async def run(self, numbers: range, at_once: int) -> None:
        """Send the requests with these numbers. at_once: connections."""
        rest = iter(numbers)
        await asyncio.gather(*(self._client(rest) for _ in range(at_once)))

    async def _client(self, numbers: Any) -> None:
        for number in numbers:
            made = self._requests.make(number)
            self.kinds[made.kind] += 1
            try:
                async with asyncio.timeout(HANG_S):
                    answer = await self._exchange(made.data, made.answers)
            except TimeoutError:
                self._fail(number, made.data, "hang")
                continue
            found = [match.decode() for match in STATUS.findall(answer)]
            self.statuses.update(found or ["closed"])
            for status in found:
                if status >= "500":
                    self._fail(number, made.data, status)

    async def _exchange(self, data: bytes, answers: int) -> bytes:
        """All received bytes. Silence ends a complete request; otherwise the connection is half-closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = b""
        try:
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    while len(STATUS.findall(answer)) < answers and (piece := await reader.read(1 << 16)):
                        answer += piece
            if not writer.transport.is_closing():  # uvloop refuses it after the server has closed
                writer.write_eof()
            while piece := await reader.read(1 << 16):
                answer += piece
        except OSError:
            pass
        finally:
            writer.transport.abort()
        return answer

    def _fail(self, number: int, data: bytes, why: str) -> None:
        self.failures.append((number, why))
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self._requests.seed}-{number}-{why}").write_bytes(data)


def client_process(pipe: Pipe, port: int, requests: Requests, numbers: range, at_once: int) -> None:
    """Run clients. Report each second the number of started requests and their outcomes so far."""
    clients = Clients(port, requests)

    def report() -> None:
        pipe.send((clients.kinds, clients.statuses, clients.failures[:MOST_FAILURES]))

    async def run() -> None:
        working = asyncio.ensure_future(clients.run(numbers, at_once))
        while not working.done():
            await asyncio.wait([working], timeout=1.0)
            report()
        working.result()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Storm:
    """Client processes, and their reports."""

    def __init__(self, port: int, requests: Requests, options: Any):
        spawn, self._pipes, self._processes = multiprocessing.get_context("spawn"), list[Pipe](), list[Any]()
        self._reports: dict[Pipe, Any] = {}
        for job in range(options.jobs):
            here, there = spawn.Pipe()
            numbers = range(options.first + job, options.first + options.requests, options.jobs)
            arguments = (there, port, requests, numbers, options.at_once)
            process = spawn.Process(target=client_process, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def continues(self) -> bool:
        """Take reports for up to a second. Returns whether more reports will arrive."""
        for pipe in wait(self._pipes, 1.0):
            assert isinstance(pipe, Pipe)
            try:
                self._reports[pipe] = pipe.recv()
            except EOFError:
                self._pipes.remove(pipe)
        return bool(self._pipes)

    def counts(self, which: int) -> Counter[str]:
        """0: kinds of requests; 1: their answers."""
        return sum((report[which] for report in self._reports.values()), Counter())

    def failures(self) -> list[tuple[int, str]]:
        return sorted(failure for report in self._reports.values() for failure in report[2])

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def broken(self) -> bool:
        """Whether a process ended before the end of its work."""
        for process in self._processes:
            process.join(10)
        return any(process.exitcode for process in self._processes)


def size_of(pid: int) -> tuple[float, int]:
    """Memory of a process in MiB, and the number of its open files."""
    return round(resident(pid, "VmRSS"), 1), open_files(pid)


def storm(run: Run, command: Command, port: int) -> dict[str, Any]:
    """Run the clients, and return the counts. Raises WrongAnswer for a failed request or a leak."""
    options = run.options
    fields = {path: list(FIELDS[path]) for path in BODIES}
    clients, worker = Storm(port, Requests(options.seed, fields), options), worker_below(command.process.pid)
    began = reported = time.monotonic()
    looks: list[float] = []  # MiB
    before = size_of(worker)
    try:
        while clients.continues() and len(clients.failures()) < MOST_FAILURES:
            done, now = clients.counts(0).total(), time.monotonic()
            run.progress("requests", done, options.requests)
            if done >= options.requests * (WARM_SHARE + (1 - WARM_SHARE) * len(looks) / LOOKS):
                looks.append(size_of(worker)[0])
                before = size_of(worker) if len(looks) == 1 else before
            if now - reported >= REPORT_S:
                reported = now
                rate = done / (now - began)
                print(f"{done:,} of {options.requests:,} requests, {rate:,.0f}/s, {len(clients.failures())} failures", flush=True)
    finally:
        clients.close() if clients.failures() else None
    seconds = time.monotonic() - began
    failures = [f"request {number}: {why}" for number, why in clients.failures()]
    check(not failures, f"--seed {options.seed}: {'; '.join(failures)}")
    check(not clients.broken(), "a client process failed")
    check(worker_below(command.process.pid) == worker, "the worker ended and was replaced")
    time.sleep(2.0)
    after = size_of(worker)
    leaks = after[0] > before[0] + LEAK_MIB or after[1] > before[1] + LEAK_FILES
    check(not leaks, f"a leak: {before} MiB and files became {after}")
    done = clients.counts(0).total()
    check(done == options.requests, f"{done:,} requests were made")
    return {
        "requests": done,
        "kinds": dict(sorted(clients.counts(0).items())),
        "answers": dict(sorted(clients.counts(1).items())),
        "requests_per_s": round(done / seconds, 1),
        "memory of the worker, MiB": [*looks, after[0]],
        "open files of the worker": [before[1], after[1]],
    }


def schemathesis(options: Any, url: str) -> dict[str, Any]:
    """Send requests generated from the OpenAPI document. Raises WrongAnswer for a failure."""
    program, *arguments = options.schemathesis.split()
    command = [str(Path(shutil.which(program) or program).resolve()), *arguments]
    command += ["run", f"{url}/openapi.json", "--seed", str(options.seed)]
    command += ["--checks", "not_a_server_error", "--max-time", str(int(options.schemathesis_s))]
    KEPT.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=KEPT)  # the folder of its examples
    print(done.stdout, flush=True)
    check(done.returncode == 0, "schemathesis found something")
    found = re.search(r"([\d,]+) generated", done.stdout)
    return {"schemathesis": {"requests": int(found[1].replace(",", "")) if found else None, "seconds": options.schemathesis_s}}


def main(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"seed {options.seed}", flush=True)
    # On a shared machine the worker may lag behind, and such a 503 is not a fault.
    command = Command("serve", "--device", "null", "--port", "0", "--log-level", "error", "--max-lag-ms", "20000")
    try:
        port = int(command.find(ADDRESS)[1])
        url = f"http://127.0.0.1:{port}"
        results = storm(run, command, port)
        if options.schemathesis:
            results |= schemathesis(options, url)
        healthy = (httpx.get(f"{url}/health").status_code, httpx.get(f"{url}/load").json()["server_load"])
        check(healthy == (200, 0), f"the server is not as healthy and idle as before: {healthy}")
        check(command.end() == 0, "the server did not end in order")
        complaints = [line for line in command.said if any(mark in line for mark in ("Traceback", "CRITICAL", "never retrieved"))]
        check(not complaints, "the server complains:\n" + "".join(command.said[-LINES:]))
    finally:
        command.kill()
    options.schemathesis = bool(options.schemathesis)  # the command is a path
    run.write(__doc__, results)
    print(", ".join(f"{count:,} {status}" for status, count in results["answers"].items()))


if __name__ == "__main__":
    run_benchmark(
        "tools.fuzz_http",
        "Damaged requests against a server.",
        main,
        requests=Flag(100_000, "how many", 2000),
        first=Flag(0, "number of the first one"),
        seed=Flag(0, "of all; 0: a random one"),
        jobs=Flag(2, "client processes"),
        at_once=Flag(128, "connections of each"),
        schemathesis=Flag("", "its command; it follows"),
        schemathesis_s=Flag(300.0, "its duration"),
    )
