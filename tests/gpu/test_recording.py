"""The flight recorder of the loop on the GPU: its recording is replayed on the CPU, decision by decision."""

from pathlib import Path

import numpy as np
from support.engine_serving import config_for, generate, serving
from support.gpu.gpu_engine_process import engine_process, report
from support.models import model_zoo
from support.recorded_cases import replay_all

from blinkpy.engine.engine import make_engine
from blinkpy.kv.state import COPIES_BEGUN, COPIES_DONE
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH
from blinkpy.recording.recording_reader import RecordingReader, read_dump
from blinkpy.scheduler.policy_vetting import recorded_policy
from blinkpy.verify.replay.replayer import Replay


def test_what_the_loop_recorded_replays_on_the_cpu(rng: np.random.Generator, folder: Path) -> None:
    engine = make_engine(config_for(folder, dtype="float32", record_steps=64, num_pages=120))  # too few pages for all
    captures = []
    with serving(engine) as pair:
        reader = RecordingReader(engine.config.engine.name)
        words = engine.runner.limits.record_words
        for _ in range(40):
            stem = rng.integers(0, model_zoo.VOCAB, 40).tolist()
            prompts = [stem + rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 60, 40)]
            samplings = [RequestParameters(max_tokens=int(n), temperature=1.0, seed=5) for n in rng.integers(1, 140, 40)]
            generate(pair, prompts, samplings)
            captures.append(reader.capture())  # from a copy of the state on, which may be a few turns
            if reader.position > 6 * words:
                break
        copies = reader._views.progress[[COPIES_BEGUN, COPIES_DONE]].tolist()
    assert copies[0] == copies[1] >= 4, copies
    replayed, preemptions = replay_all(captures, "preemptions")
    assert replayed > 100
    assert preemptions > 0, "no request was preempted, so the test proves too little"


def test_the_recording_outlives_a_fault_of_the_gpu(folder: Path) -> None:
    """The ring and the copies are host memory: a failing loop's last steps can be saved."""
    config = config_for(folder, dtype="float32", record_folder=str(folder / "crashes"))
    with engine_process(config) as (process, pair):
        _, flags = generate(pair, [[1, 2, 3]] * 3, [RequestParameters(max_tokens=30, temperature=0.0)] * 3)
        assert flags == [FINISH_LENGTH] * 3
        report(process, "fault")
        assert process.wait(60) == 3
    (saved,) = (folder / "crashes").glob("crash-*.recording")
    capture = read_dump(saved)
    replay = Replay(capture, recorded_policy(capture.description, ""))
    assert [d for _, d in replay.run() if d] == []
    assert len(replay.turns) > 30
