"""The whole engine on several GPUs: tokens, equal states, faults. If a machine has one GPU, it has both ranks, except for the
families: there, the engine ended on one H200.

Supports claims ranks/results, ranks/state.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import config_for, generate, serving
from support.gpu.two_gpus import have_two
from support.models import model_zoo

from blinkpy.device.cuda import CudaError
from blinkpy.engine.devices.cuda_device import CudaDevice
from blinkpy.engine.devices.rank_loops import Rank, RankLoops
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH
from blinkpy.scheduler import rank_exchange as X

GPUS = (0, 1) if have_two() else (0, 0)
FAULT_S = 2.5  # a fault is reported within 2 s, and the host polls 20 times per second


def engine_on(folder: Path, **values: Any) -> Engine:
    return make_engine(config_for(folder, **values), device=CudaDevice(gpus=GPUS))


def ranks_of(engine: Engine) -> RankLoops:
    assert isinstance(engine.runner, RankLoops)
    return engine.runner


def prompts_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    prompts = [rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 150, count)]
    return [*prompts, prompts[0] + [1, 2, 3]]  # shares pages


def test_greedy_tokens_are_those_of_transformers(rng: np.random.Generator, folder: Path) -> None:
    prompts = prompts_of(rng, 24)
    greedy = RequestParameters(max_tokens=20, temperature=0.0)
    engine = engine_on(folder, dtype="float32")
    with serving(engine) as pair:
        ranks = ranks_of(engine)
        first, flags = generate(pair, prompts, [greedy] * len(prompts))
        assert flags == [FINISH_LENGTH] * len(prompts)
        sampled = [RequestParameters(max_tokens=20, temperature=1.0, seed=7 + i, top_p=0.9) for i in range(len(prompts))]
        drawn, _ = generate(pair, prompts, sampled)
        again, _ = generate(pair, prompts, sampled)
        states = end(engine, ranks)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = [model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :] for prompt in prompts]
    assert first == [tokens.tolist() for tokens in wanted]
    assert drawn == again
    assert drawn != first
    assert not differences(*states)


def end(engine: Engine, ranks: RankLoops) -> list[dict[str, Any]]:
    """Stop the engine. Returns the state of each rank, without the recorder, which only rank 0 has."""
    engine.stop()
    deadline = time.monotonic() + 10
    while any(ranks._running()):
        assert time.monotonic() < deadline, "the loops do not end"
        time.sleep(0.01)
    assert not ranks.check()
    states = [snapshot(ranks._host_state(number)) for number in range(len(ranks.ranks))]
    kept = [name for name in states[0] if not name.startswith(("recorder.", "forecast."))]
    return [{name: state[name] for name in kept} for state in states]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss-mxfp4", "gemma3"])
def test_families_in_bfloat16(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    """Every request gets its tokens, with preemption and cached pages. Both ranks end in the same state."""
    if not have_two():
        pytest.skip("needs two GPUs")
    config = {"intermediate_size": 128} if name == "gpt-oss-mxfp4" else {}
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16, **config)
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = engine_on(tmp_path, num_pages=48)
    prompts = prompts_of(rng, 40)
    wanted = [RequestParameters(max_tokens=int(n), temperature=0.8, seed=3) for n in rng.integers(1, 60, len(prompts))]
    with serving(engine) as pair:
        ranks = ranks_of(engine)
        tokens, flags = generate(pair, prompts, wanted)
        assert flags == [FINISH_LENGTH] * len(prompts)
        assert [len(some) for some in tokens] == [each.max_tokens for each in wanted]
        states = end(engine, ranks)
    assert not differences(*states)


def fault_after(rng: np.random.Generator, folder: Path, words: Callable[[Rank], Any], value: int) -> str:
    """The error of an engine on which a word of rank 1 is overwritten while it is idle.

    words: array whose first word is overwritten.
    """
    engine, prepared = engine_on(folder), torch.tensor([value]).pin_memory()
    with pytest.raises(CudaError) as raised, serving(engine) as pair:
        generate(pair, prompts_of(rng, 4), [RequestParameters(max_tokens=5)] * 5)
        ranks = ranks_of(engine)
        rank = ranks.ranks[1]
        side = torch.cuda.Stream(rank.gpu)
        with torch.cuda.device(rank.gpu), torch.cuda.stream(side):
            words(rank)[:1].copy_(prepared, non_blocking=True)
        side.synchronize()
        since = time.monotonic()
        while any(ranks._running()) and time.monotonic() < since + 10:
            time.sleep(0.01)
        assert time.monotonic() - since < FAULT_S
    return str(raised.value)


def test_a_state_that_differs_is_named(rng: np.random.Generator, folder: Path) -> None:
    error = fault_after(rng, folder, lambda rank: rank.state.counters[3:], 10**9)
    assert error.startswith("rank 1 is not in the scheduler's state of rank 0: counters[3]: ")


def test_a_stopped_rank_is_detected(rng: np.random.Generator, folder: Path) -> None:
    error = fault_after(rng, folder, lambda rank: rank.own[X.FAULT :], X.RANK_LATE)
    assert error.startswith("rank 1 did not answer rank 0 in time")
