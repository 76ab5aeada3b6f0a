"""--device null: real queues and scheduler, synthetic tokens, no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blinkpy.config import Config
from blinkpy.engine.devices.device_contract import HostDevice, Runner, Setup

if TYPE_CHECKING:
    from blinkpy.models.description.decoder_description import DecoderDescription

PAGE_BYTES = 1  # the minimum: no keys and values are stored
PAGES = 1 << 16


class NullDevice(HostDevice):
    """See blinkpy.engine.devices.device_contract.Device."""

    name, reads_weights = "null", False

    def auto_rank(self) -> int:
        return 0

    def unusable(self, config: Config) -> str:
        if config.cache.kv_cache_dtype != "auto":
            return "kv_cache_dtype needs --device cpu or cuda: --device null keeps no keys and values"
        return super().unusable(config)

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        return PAGE_BYTES

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        return PAGES * PAGE_BYTES

    def load(self, setup: Setup) -> Runner:
        from blinkpy.engine.devices.host_loop import HostLoop
        from blinkpy.engine.devices.null_step import synthetic_step

        setup.report("allocating queues and pages")
        loop = HostLoop(setup, setup.recorder.attach(setup.make_state(), share_inputs=True))
        vocab = setup.model.vocab_size  # in most vocabularies, special tokens (without text) come first
        loop.compute = synthetic_step(loop.scheduler, range(vocab // 16, vocab), setup.config.engine.null_step_us * 1000)
        return loop


DEVICE = NullDevice
