"""One engine: shared queues, the scheduler, and a device that runs the model; see blinkpy.engine.devices.device_contract."""

import logging
import secrets

from blinkpy.config import DEFAULT_SLOTS, EAGLE, MTP, NGRAM, NO_HITS, Config, ConfigError, step_sizes
from blinkpy.dpu.fleet.identity import tokenizer_digest
from blinkpy.engine.devices.device_contract import BrokenStateError, Device, Runner, Setup, choose_device, require_integrity
from blinkpy.engine.flight_recorder import FlightRecorder
from blinkpy.engine.link.listeners import ENDS
from blinkpy.engine.link.pair_memory import HOST, QueueMemory
from blinkpy.engine.sizing import (
    EngineSizes,
    engine_sizes,
    grammar_arena,
    grammar_words,
    model_digest,
    read_token_bytes,
    running_on,
)
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_model
from blinkpy.models.gpu.step_shapes import most_groups
from blinkpy.models.paged_cache import ring_sizes
from blinkpy.models.recurrent_states import require_recurrent
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.head_loader import with_draft_head
from blinkpy.models.weights.model_folder import find_head, resolve_model
from blinkpy.progress import ProgressCallback, TimedPhases
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineFacts, EngineViews
from blinkpy.queues.page_hash import HASH_MULTIPLIER_RANGE
from blinkpy.scheduler.policy_vetting import vetted_policy
from blinkpy.transport.contract import chosen_end
from blinkpy.transport.segment import Segment, create_segment
from blinkpy.transport.verbs import RdmaOptions

logger = logging.getLogger("blinkpy.engine")
SHORT_FACTORS = "the context is that of the short rope factors, %d tokens; --max-model-len takes up to %d, with the long ones"
LONG_FACTORS = "beyond %d tokens (of %d) the rope factors are the long ones for all requests: short prompts get other answers"


def make_engine(config: Config, on_progress: ProgressCallback | None = None, device: Device | None = None) -> "Engine":
    """The engine for --device. "auto" selects the GPU if one is present and its packages are installed,
    otherwise the CPU.

    device: overrides the option, for benchmarks.
    Allocates nothing. Raises ConfigError if the device is not available.
    """
    device = device or choose_device(config.engine.device)
    queue_memory = config.extension(RdmaOptions).queue_memory
    if queue_memory != HOST and not chosen_end(ENDS, config).crosses_machines:
        raise ConfigError(
            f"--queue-memory {queue_memory} needs --transport rdma: front ends on this machine can only use host memory"
        )
    problem = device.unusable(config)
    if problem:
        raise ConfigError(problem)
    return Engine(config.with_options({"device": device.name}), device, on_progress)


class Engine:
    """One engine on this machine. timings: seconds of the start's phases. Raises ConfigError for errors that
    the user can correct.
    """

    def __init__(self, config: Config, device: Device, on_progress: ProgressCallback | None = None):
        self.config, self.device = config, device
        self.segment: Segment
        self.sizes: EngineSizes
        self.views: EngineViews
        self.runner: Runner | None = None
        self._report = TimedPhases(on_progress)
        self.timings = self._report.seconds
        self._recorder: FlightRecorder | None = None
        self._started = False

    @property
    def pair_memory(self) -> QueueMemory | None:
        """Registration of the pairs' memory with a network card; None: the pairs are in the segment."""
        return self.runner.pair_memory if self.runner is not None else None

    def start(self) -> None:
        """Load the model, allocate memory, compile, warm up, and announce the engine. The engine answers front ends once run() is
        called.
        """
        with self.device.start_errors(self._report):
            self._start()
        self._report("")

    def _start(self) -> None:
        device, report = self.device, self._report
        policy = vetted_policy(self.config.scheduler.policy)
        report("reading the model")
        weights = device.reads_weights and self.config.model.load_format != "dummy"
        folder = resolve_model(self.config.model.model, weights=weights, tokenizer=False)
        model = describe_model(folder, self.config.model.quantization)
        model = self._with_drafts(model)
        if weights:
            model = as_stored(model, folder)
        if head := self.config.model.speculative_model:
            head = str(find_head(head, weights=weights))
            self.config = self.config.with_options({"speculative_model": head})
            model = with_draft_head(model, head, weights=weights)
        if ring_sizes(self.config, model) is not None and self.config.cache.enable_prefix_caching:
            logger.warning("prefix caching is off: %s (window_cache ring)", NO_HITS)
            self.config = self.config.with_options({"enable_prefix_caching": False})
        require_recurrent(self.config, model)
        bare = any(layer.mlp is None for layer in model.layers)
        if self.config.scheduler.step_groups > (most := most_groups(model.own_layers, bare=bare)):
            raise ConfigError(f"step_groups must be at most {most}: {model.name} has {model.own_layers} layers")
        longest = device.step_tokens(self.config, model)
        sizes = step_sizes(self.config.scheduler, gpu=device.gpu, experts=any(model.expert_layers), tokens=longest)
        config = self.config = self.config.with_options(sizes)  # defaults of unset sizes, which depend on the model
        if not config.queue.slots:
            config = self.config = config.with_options({"slots": device.slots(config, model)})
            if config.queue.slots < DEFAULT_SLOTS:
                logger.info("slots is %d per worker, since each needs a recurrent state of %s", config.queue.slots, model.name)
        if model.recurrence is not None and config.cache.enable_prefix_caching:
            config = self.config = self._with_snapshots(config, model)
        page_bytes, cache_bytes = device.page_bytes(config, model), device.cache_bytes(config, model)
        asked = config.model.max_model_len
        self.sizes = engine_sizes(config, model.max_position if asked else model.default_context, page_bytes, cache_bytes)
        if model.max_position > model.default_context:
            bounds = model.default_context, model.max_position
            logger.warning(LONG_FACTORS if asked > model.default_context else SHORT_FACTORS, *bounds)
        tokens = read_token_bytes(folder, model.vocab_size) if config.engine.grammar_slots else None
        digests = {"model_digest": model_digest(config, folder, weights), "tokenizer_digest": tokenizer_digest(folder)}
        facts = self._facts(model, tokens is not None)._replace(**digests)
        limits = self._make_limits(facts, 0 if tokens is None else len(tokens.words))
        self._recorder = FlightRecorder(config, self.sizes.queue, limits, policy)
        self.runner = device.load(Setup(config, folder, model, self.sizes, limits, tokens, policy, self._recorder, report))
        with running_on(device.near_cores()):
            self.segment = create_segment(config.engine.name, self.sizes.queue, facts)
        self._started = True
        self._recorder.publish()
        self.views = self.segment.views()
        self.runner.attach(self.segment)
        self.views.engine[W.ENGINE_STATE] = W.STATE_READY

    def _with_drafts(self, model: DecoderDescription) -> DecoderDescription:
        """The description, with the draft layer if drafts come from a draft layer. Raises ConfigError if the model or the device
        does not support the chosen kind of drafts.
        """
        kind = self.config.scheduler.speculative
        if model.recurrence is not None and kind == EAGLE:
            raise ConfigError(f"speculative_model does not support {model.name}, which has recurrent layers")
        if kind in (MTP, EAGLE) and not self.device.has_draft_layers:
            raise ConfigError(
                f"speculative {kind} needs device cuda or cpu, not {self.device.name}: use speculative ngram or off"
            )
        return model.with_draft_layer() if kind == MTP else model

    def _with_snapshots(self, config: Config, model: DecoderDescription) -> Config:
        """The options with the number of state snapshots; without prefix caching if no snapshot fits."""
        if count := self.device.snapshots(config, model):
            size = model.state_bytes(4) / 2**20
            logger.info("prefix caching has %d snapshots of recurrent states, of at most %.1f MiB each", count, size)
            return config.with_options({"state_snapshots": count})
        logger.warning("prefix caching is off: no snapshot of the recurrent state of %s fits", model.name)
        return config.with_options({"enable_prefix_caching": False})

    def _make_limits(self, facts: EngineFacts, token_words: int) -> Limits:
        return make_limits(
            self.sizes.queue,
            facts,
            self.config.scheduler,
            prefix_caching=self.config.cache.enable_prefix_caching,
            record_turns=self.config.engine.record_steps,
            token_words=token_words,
            snapshots=self.config.cache.state_snapshots,
            snapshot_tokens=self.config.cache.snapshot_tokens,
        )

    def _facts(self, model: DecoderDescription, grammars: bool) -> EngineFacts:
        low, high = HASH_MULTIPLIER_RANGE
        return EngineFacts(
            instance=secrets.randbits(62) | 1,
            hash_multiplier_1=low + secrets.randbelow(high - low),
            hash_multiplier_2=low + secrets.randbelow(high - low),
            max_model_len=self.sizes.max_model_len,
            vocab_size=model.vocab_size,
            page_size=self.sizes.page_size,
            num_pages=self.sizes.num_pages,
            max_num_seqs=self.sizes.max_num_seqs,
            lease_ms=self.config.queue.lease_ms,
            grammar_share=self.config.engine.grammar_slots // self.config.frontend.workers if grammars else 0,
            grammar_words=grammar_words(self.config) if grammars else 0,
            grammar_arena=grammar_arena(self.config) if grammars else 0,
            predictions=int(self.config.scheduler.speculative == NGRAM),
        )

    def run(self, budget_s: float = 0) -> None:
        """Serve until stopped or drained. A fault is announced to the front ends before it is raised. budget_s: time limit in
        seconds, for tests and benchmarks; 0: no limit.
        """
        runner = self.runner
        if runner is None:
            raise RuntimeError("call start() before run()")
        when = self.config.engine.check_integrity
        faults: tuple[type[BaseException], ...] = (*runner.faults, BrokenStateError)
        try:
            result = runner.run(budget_s)
            if when == "always" or (result == S.DRAINED and when != "never"):
                require_integrity(runner.check())
        except faults as error:
            self._announce_fault(error)
            raise
        self.views.engine[W.ENGINE_STATE] = W.STATE_STOPPED

    def _announce_fault(self, error: BaseException) -> None:
        """Report to the front ends that the engine failed, and save its recording."""
        if isinstance(error, BrokenStateError):
            self.views.engine[W.COUNTER["integrity_errors"]] += len(error.faults)
        self.views.control[W.CONTROL_FAULT] = 1
        self.views.engine[W.ENGINE_STATE] = W.STATE_FAULTED
        if self._recorder is not None:
            self._recorder.save_crash(error)

    def stop(self, drain: bool = False) -> None:
        """Ask run() to return. drain: only after all accepted requests have ended. Callable from any thread or signal handler."""
        self.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN if drain else W.COMMAND_STOP
        if drain and self.views.engine[W.ENGINE_STATE] == W.STATE_READY:
            self.views.engine[W.ENGINE_STATE] = W.STATE_DRAINING

    def close(self) -> None:
        """Free the device's resources and remove the segment; front ends then detach. Call it after run()
        has returned or raised.
        """
        if self.runner is not None:
            self.runner.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._started:
            self.segment.close()
            self._started = False
