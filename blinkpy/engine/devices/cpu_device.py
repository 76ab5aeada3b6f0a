"""--device cpu: the model's step on torch and Numba, on the processor."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from blinkpy.config import Config
from blinkpy.engine.devices.device_contract import Runner, Setup, needs_gpu

if TYPE_CHECKING:
    from blinkpy.models.description.decoder_description import DecoderDescription


class CpuDevice:
    """See blinkpy.engine.devices.device_contract.Device."""

    name, gpu, reads_weights = "cpu", False, True
    start_errors = nullcontext

    def auto_rank(self) -> int:
        return 1

    def unusable(self, config: Config) -> str:
        return needs_gpu(config, self.name)

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.paged_cache import kv_bytes_per_page
        from blinkpy.models.weights.decoder_weights import choose_dtype

        return kv_bytes_per_page(model, config.cache.page_size, choose_dtype(model, config.model.dtype, "cpu"))

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        return config.cache.cpu_cache_mib << 20

    def load(self, setup: Setup) -> Runner:
        from blinkpy.engine.devices.host_loop import HostLoop
        from blinkpy.kv.state_memory import make_state

        step = self._load_step(setup)
        setup.report("allocating queues and pages")
        return HostLoop(setup, setup.recorder.attach(make_state(setup.limits, checked=setup.checked)), step)

    def _load_step(self, setup: Setup) -> Any:
        import torch

        from blinkpy.models.cpu.cpu_step import CpuStep
        from blinkpy.models.weights.decoder_weights import choose_dtype, dummy_weights, load_weights

        options, sizes, model, report = setup.config.model, setup.sizes, setup.model, setup.report
        if setup.config.engine.threads:
            torch.set_num_threads(setup.config.engine.threads)
        dtype = choose_dtype(model, options.dtype, "cpu")
        report("loading weights")
        if options.load_format == "dummy":
            weights = dummy_weights(model, options.seed, dtype)
        else:
            weights = load_weights(model, setup.folder, dtype, progress=lambda share: report("loading weights", share, 1))
        report("preparing the model's step")
        return CpuStep(model, weights, sizes.num_pages, sizes.page_size, sizes.max_model_len, sizes.max_num_batched_tokens)


DEVICE = CpuDevice
