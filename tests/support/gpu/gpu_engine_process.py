"""A CUDA engine in a separate process, for tests that stop, break or drain it.

Its process reads options as JSON from the first argument, and prints "ready" to standard output. Then it reads a command from
each line of standard input: drain, stop, or fault (an illegal access on the GPU). Its exit code is 0, or 3 after a fault of the
GPU.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from blinkpy.config import Config, as_table
from blinkpy.device.cuda import CudaError
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.engine.engine import make_engine

START_S, ATTACH_S = 150.0, 20.0


@contextlib.contextmanager
def engine_process(config: Config) -> Iterator[tuple[subprocess.Popen[str], QueuePair]]:
    """The process, and a client of its engine."""
    command = [sys.executable, __file__, json.dumps(dict(as_table(config)))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert select.select([process.stdout.fileno()], [], [], START_S)[0], "the engine is not ready in time"
        assert process.stdout.readline() == "ready\n"
        pair = QueuePair(attach_segment(config.engine.name, 0, ATTACH_S))
        pair.attach(ATTACH_S)
        yield process, pair
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(20)
        process.stdin.close()
        process.stdout.close()


def report(process: subprocess.Popen[str], word: str) -> None:
    process.stdin.write(word + "\n")
    process.stdin.flush()


def illegal_access() -> Callable[[], None]:
    """A function that makes the GPU read far outside of allocated memory."""
    values, good = torch.zeros(8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    bad = good + (1 << 40)
    values[good].sum()  # loaded now: a later load would wait until the loop ends
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    def access() -> None:
        with torch.cuda.stream(side):
            values[bad]

    return access


def main() -> int:
    engine = make_engine(Config().with_options(json.loads(sys.argv[1])))
    engine.start()
    access = illegal_access()

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "fault":
                access()
            else:
                engine.stop(drain=line.strip() == "drain")

    threading.Thread(target=obey, daemon=True).start()
    print("ready", flush=True)
    try:
        engine.run(300)
    except CudaError as error:
        print(error, file=sys.stderr, flush=True)
        return 3
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
