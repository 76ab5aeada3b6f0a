"""A CUDA engine in a process of its own, for tests that stop it, break it or drain it. Not a test itself.

Reads its options as JSON from the first argument, says "ready" on standard output, and then takes one word a line from
standard input: drain, stop, fault (an illegal access on the GPU). Ends with exit code 0, or 3 after a fault of the GPU.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])]

import torch  # noqa: E402

from blinkpy.config import Config  # noqa: E402
from blinkpy.device.cuda.cuda_calls import CudaError  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402


def main() -> int:
    engine = make_engine(Config().with_options(json.loads(sys.argv[1])))
    engine.start()
    values, good = torch.zeros(8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    bad = good + (1 << 40)
    values[good].sum()  # loaded now: a kernel that is loaded while the loop runs would wait for its end
    torch.cuda.synchronize()

    def obey() -> None:
        side = torch.cuda.Stream()
        for line in sys.stdin:
            if line.strip() == "fault":
                with torch.cuda.stream(side):
                    values[bad]
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
