"""A pool of threads that all run from the start: later, a machine may have no process id or memory for one more."""

import threading
from concurrent.futures import ThreadPoolExecutor

START_S = 30.0  # for all threads to run, s


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads, which never starts another thread.

    name: prefix of its threads' names, before their numbers.

    Raises RuntimeError if the machine can't start that many threads.
    """
    pool, running = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each waits for all others, so none can take the place of two
            pool.submit(running.wait, START_S)
        running.wait(START_S)
    except BaseException:
        running.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool
