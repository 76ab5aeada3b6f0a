"""The host is not on the path of a token: the engine's process is stopped under load, without an effect on clients."""

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_serving import config_for
from support.gpu.gpu_engine_process import engine_process, report

from benchmarks.common.model_shapes import SHAPES
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH, FINISH_MASK, HAS_TOKEN

pytestmark = pytest.mark.whole_gpu  # it measures the waits of clients

STOPPED_S = float(os.environ.get("BLINKPY_STOPPED_S", "20"))
STREAMS = 64
# So large that a step takes some milliseconds: a client in Python reads 64 streams.
MODEL: dict[str, Any] = SHAPES["llama-3-8b"] | {"vocab_size": 32000, "num_hidden_layers": 24}


@pytest.mark.timeout(400)
def test_streams_continue_while_the_engine_process_is_stopped(rng: np.random.Generator, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "tokenizer.json").write_text("{}")
    sizes = {"max_num_seqs": STREAMS, "slots": 2 * STREAMS, "num_pages": 0, "max_model_len": 4096}
    with engine_process(config_for(tmp_path, load_format="dummy", **sizes)) as (process, pair):
        last: dict[InFlightRequest, float] = {}
        gaps: list[tuple[float, float]] = []  # (when, length) of the pauses between two tokens of a stream
        ended = {"before": 0, "stopped": 0, "after": 0}
        phase, began, beat = "before", time.monotonic(), 0.0

        def submit() -> None:
            prompt = rng.integers(0, 32000, int(rng.integers(4, 60))).astype(np.int32)
            # Random lengths: streams end and begin all the time, even while the host is stopped.
            pair.submit(prompt, RequestParameters(max_tokens=int(rng.integers(50, 2000)), temperature=0.0))

        gc.collect()
        gc.freeze()  # a garbage collection of all imported modules takes a quarter of a second, but does not pause the engine
        for _ in range(STREAMS):
            submit()
        while phase != "after" or time.monotonic() - began < STOPPED_S + 6:
            now = time.monotonic()
            for request, _, flags in pair.poll():
                if flags & HAS_TOKEN:
                    if request in last:
                        gaps.append((now, now - last[request]))
                    last[request] = now
                if flags & FINISH_MASK:
                    assert flags & FINISH_MASK == FINISH_LENGTH
                    last.pop(request, None)
                    ended[phase] += 1
                    submit()
            if now > beat:
                pair.heartbeat()
                pair.check()
                beat = now + 0.2
            if phase == "before" and now - began > 3:
                phase, stopped_at = "stopped", now
                process.send_signal(signal.SIGSTOP)
            elif phase == "stopped" and now - stopped_at > STOPPED_S:
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                assert state == "T", "the engine's process was not stopped"
                phase, continued_at = "after", now
                process.send_signal(signal.SIGCONT)
            time.sleep(0.0003)
        report(process, "drain")
        for request in list(last):
            pair.cancel(request)
        deadline = time.monotonic() + 20
        while pair.in_flight and time.monotonic() < deadline:
            pair.poll()
            pair.heartbeat()
            time.sleep(0.001)
        assert process.wait(20) == 0
        times = np.array([gap for at, gap in gaps if stopped_at + 0.1 < at < continued_at])
        before = np.array([gap for at, gap in gaps if began + 1 < at < stopped_at])
        names = ("p50", "p99", "max")
        figures, earlier = (dict(zip(names, np.percentile(some, (50, 99, 100)), strict=True)) for some in (times, before))
        print(f"seconds between tokens before {earlier}, while stopped {figures}; ended {ended}; {len(times)} tokens")
        assert ended["stopped"] > 10
        assert figures["max"] < 3 * figures["p50"], f"while stopped: {figures}"
