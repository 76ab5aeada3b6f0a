"""--device cpu: the model's step on torch and Numba, on the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blinkpy.config import Config
from blinkpy.engine.devices.device_contract import HostDevice, Runner, Setup

if TYPE_CHECKING:
    from blinkpy.models.description.decoder_description import DecoderDescription


class CpuDevice(HostDevice):
    """See blinkpy.engine.devices.device_contract.Device."""

    name, reads_weights = "cpu", True

    def auto_rank(self) -> int:
        return 1

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.paged_cache import kv_bytes_per_page
        from blinkpy.models.weights.decoder_weights import choose_dtype

        return kv_bytes_per_page(model, config.cache.page_size, choose_dtype(model, config.model.dtype, "cpu"))

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        return config.cache.cpu_cache_mib << 20

    def load(self, setup: Setup) -> Runner:
        import torch

        from blinkpy.engine.devices.host_loop import HostLoop
        from blinkpy.models.cpu.cpu_step import CpuStep
        from blinkpy.models.weights.decoder_weights import choose_dtype

        sizes, model = setup.sizes, setup.model
        if setup.config.engine.threads:
            torch.set_num_threads(setup.config.engine.threads)
        weights = setup.load_weights(choose_dtype(model, setup.config.model.dtype, "cpu"), "cpu")
        setup.report("preparing the model's step")
        tokens = setup.config.scheduler.max_num_batched_tokens
        step = CpuStep(model, weights, sizes.num_pages, sizes.page_size, sizes.max_model_len, tokens)
        setup.report("allocating queues and pages")
        return HostLoop(setup, setup.recorder.attach(setup.make_state(), share_inputs=True), step)


DEVICE = CpuDevice
