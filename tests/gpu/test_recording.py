"""The flight recorder of the loop on the GPU: what it recorded while it served is replayed on the CPU, decision by decision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from support.gpu.gpu_serving import config_for, generate, serving
from support.models import model_zoo

from blinkpy.config import as_table
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.engine.engine import make_engine
from blinkpy.kv.state import COPIES_BEGUN, COPIES_DONE, COUNTER_INDEX
from blinkpy.queues.completion import FINISH_LENGTH
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.verify.recording.dump_file import read_dump
from blinkpy.verify.recording.recorded_policy import recorded_policy
from blinkpy.verify.recording.recording_reader import RecordingReader
from blinkpy.verify.replay.replayer import Replay


def test_what_the_loop_recorded_replays_on_the_cpu(rng: np.random.Generator, tmp_path: Path) -> None:
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = make_engine(config_for(tmp_path, dtype="float32", record_steps=64, num_pages=120))  # too few pages for all
    replayed, preemptions = 0, 0
    with serving(engine) as pair:
        reader = RecordingReader(engine.config.engine.name)
        words = engine.runner.limits.record_words
        for _ in range(40):
            stem = rng.integers(0, model_zoo.VOCAB, 40).tolist()
            prompts = [stem + rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 60, 40)]
            samplings = [RequestParameters(max_tokens=int(n), temperature=1.0, seed=5) for n in rng.integers(1, 140, 40)]
            generate(pair, prompts, samplings)
            if reader.position > 3 * words:
                break
        capture = reader.capture()
        replay = Replay(capture, recorded_policy(capture.description, ""), "njit")
        before = int(replay.state.counters[COUNTER_INDEX["preemptions"]])
        for turn, differences in replay.run():
            assert not differences, (turn.number, differences)
            replayed += 1
        preemptions = int(replay.state.counters[COUNTER_INDEX["preemptions"]]) - before
        copies = reader._views.progress[[COPIES_BEGUN, COPIES_DONE]].tolist()
    assert copies[0] == copies[1] >= 4, copies
    assert replayed > 100
    assert preemptions > 0, "nothing was preempted: the test says less than it should"


def test_the_recording_outlives_a_fault_of_the_gpu(rng: np.random.Generator, tmp_path: Path) -> None:
    """The ring and the copies are host memory: a failing loop's last steps can be saved."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = config_for(tmp_path, dtype="float32", record_folder=str(tmp_path / "crashes"))
    options = dict(as_table(config))
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "gpu" / "gpu_engine_process.py"), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    pair = QueuePair(attach_segment(config.engine.name, 0, 20))
    pair.attach(20)
    _, flags = generate(pair, [[1, 2, 3]] * 3, [RequestParameters(max_tokens=30, temperature=0.0)] * 3)
    assert flags == [FINISH_LENGTH] * 3
    process.stdin.write("fault\n")
    process.stdin.flush()
    assert process.wait(60) == 3
    process.stdin.close()
    process.stdout.close()
    (saved,) = (tmp_path / "crashes").glob("crash-*.recording")
    capture = read_dump(saved)
    replay = Replay(capture, recorded_policy(capture.description, ""))
    assert [d for _, d in replay.run() if d] == []
    assert len(replay.turns) > 30
