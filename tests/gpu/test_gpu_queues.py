"""Queue pairs in GPU memory: a simulated network card writes and reads them while the loop runs.

It copies piece by piece, on a separate stream, between the front end's memory and GPU addresses, as a card does. So everything
above the verbs is real: the transport, the loop, and the pairs' place.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_serving import config_for, generate, serving
from support.models import model_zoo

from benchmarks.parts.rdma_cpu import Card, connect
from blinkpy.config import ConfigError
from blinkpy.dpu.link import connect_rdma, rdma_writes
from blinkpy.engine.engine import make_engine
from blinkpy.engine.link import pair_placement
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import PAIR_ATTACHED


class CopyingCard(Card):
    """A Card that accesses GPU memory. It pins given memory, as a real card does, until unpin().

    Made before the loop runs, and unpinned after it has ended: pinning may wait for the GPU.
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        from blinkpy.device.cuda import check_cuda

        super().__init__()
        self._runtime, self._check, self._pinned = runtime, check_cuda, list[int]()
        self._stream = check_cuda(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))

    def register(self, address: int, length: int, access: int) -> Any:
        self._check(self._runtime.cudaHostRegister(address, length, self._runtime.cudaHostRegisterPortable), "pin")
        self._pinned.append(address)
        return super().register(address, length, access)

    def _copy(self, to: int, source: int, length: int) -> None:  # type: ignore[override]
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._check(self._runtime.cudaMemcpyAsync(to, source, length, kind, self._stream), "copy")
        self._check(self._runtime.cudaStreamSynchronize(self._stream), "copy")

    def unpin(self) -> None:
        while self._pinned:
            self._check(self._runtime.cudaHostUnregister(self._pinned.pop()), "unpin")


@pytest.mark.parametrize("queue_memory", ["dmabuf", "peermem"])
def test_answers_are_those_of_queues_in_host_memory(rng, folder, queue_memory, monkeypatch) -> None:
    monkeypatch.setattr(pair_placement, "PEER_MEMORY_MODULE", folder)  # the card is simulated, so its module need not be loaded
    for module, name in ((rdma_writes, "module"), (rdma_writes, "constants"), (connect_rdma, "constants")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restore the attributes that connect() replaces
    prompts = [rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 150, 48)]
    prompts += [prompts[0] + [1, 2, 3]]  # shares pages by the front end's hashes
    samplings = [RequestParameters(max_tokens=20, temperature=0.0, logprobs=int(rng.integers(-1, 5))) for _ in prompts]
    with serving(make_engine(config_for(folder, dtype="float32"))) as pair:
        wanted = [generate(pair, prompts, samplings) for _ in range(3)]

    engine = make_engine(config_for(folder, dtype="float32", transport="rdma", queue_memory=queue_memory))

    cards: list[CopyingCard] = []

    def attach() -> connect_rdma.RdmaTransport:
        cards.append(CopyingCard())
        return connect(engine.segment, cards[0], engine.runner.placed_pairs.address)

    with serving(engine, attach=attach) as pair:
        layout = engine.segment.layout
        found = [generate(pair, prompts, samplings) for _ in range(3)]
        # The listener reads these words while the loop runs.
        assert engine.pair_memory.read_word(layout.engine_region(0) - layout.first_pair + 8 * PAIR_ATTACHED) == 1
        if queue_memory == "dmabuf":
            assert "dmabuf" in os.readlink(f"/proc/self/fd/{engine.runner.placed_pairs.export()}")
        own_place = np.frombuffer(engine.segment.buffer, np.uint8, offset=layout.first_pair)
        assert not own_place.any()  # no data went through host memory
        del own_place
    cards[0].unpin()
    assert found == wanted


@pytest.mark.parametrize(
    ("queue_memory", "attribute", "value"),
    [("peermem", "PEER_MEMORY_MODULE", Path("/nowhere")), ("dmabuf", "WRITES_ORDERED", 1 << 30)],
)
def test_unsupported_machines_are_refused_before_the_model_is_read(folder, queue_memory, attribute, value, monkeypatch) -> None:
    monkeypatch.setattr(pair_placement, attribute, value)
    with pytest.raises(ConfigError, match=f"--queue-memory {queue_memory} does not work on this machine .*use host"):
        make_engine(config_for(folder / "nothing", transport="rdma", queue_memory=queue_memory))
