"""An engine that the host drives: shared queues, the scheduler compiled for the CPU, and a step on torch (or a made-up one).

One thread runs the loop: schedule(), then the step that it asked for. While there is nothing to do the loop sleeps, for
longer and longer up to a bound, so that an idle engine costs no core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
import time
from pathlib import Path
from typing import Protocol

from blinkpy.config import Config, step_sizes
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.engine.sizing import EngineSizes, engine_sizes
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.kv.state import Batch, Requests, State
from blinkpy.kv.state_memory import make_state
from blinkpy.models.description.decoder_description import Architecture, read_architecture
from blinkpy.models.weights.model_folder import resolve_model
from blinkpy.progress import Report
from blinkpy.queues.header import EngineFacts
from blinkpy.queues.page_hash import HASH_MULTIPLIER_RANGE
from blinkpy.queues.views import EngineViews
from blinkpy.queues.words import (
    COMMAND_DRAIN,
    COMMAND_STOP,
    CONTROL_COMMAND,
    CONTROL_FAULT,
    COUNTER,
    ENGINE_STATE,
    STATE_DRAINING,
    STATE_FAULTED,
    STATE_READY,
    STATE_STOPPED,
)
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.sources import SCHEDULER, source_digest
from blinkpy.transport.segment import Segment, create_segment
from blinkpy.verify.policy_check.guard import vetted_policy
from blinkpy.verify.recording.crash_dump import crash_folder, save_crash
from blinkpy.verify.recording.recorded_policy import policy_facts
from blinkpy.verify.recording.recording_errors import RecordingError
from blinkpy.verify.recording.recording_memory import RecordingMemory
from blinkpy.verify.recording.recording_reader import RecordingReader

IDLE_SPIN_NS = 200_000  # an engine that just worked looks again at once
IDLE_SLEEP_S = (20e-6, 1e-3)  # then it sleeps: first, and longest, pause
INTEGRITY_PERIOD_NS = 1_000_000_000  # while idle
NULL_TURN_NS = 50_000_000  # longest stay in compiled code
NULL_PAGE_BYTES = 1  # the null engine keeps no keys and values
NULL_PAGES = 1 << 16


class Step(Protocol):
    """Computes one batch."""

    def run(self, batch: Batch, requests: Requests) -> None:
        """Write K/V of the batch's tokens into the cache, and batch.sampled for the rows that emit."""


class Engine:
    """One engine on this machine, driven by this process.

    start() allocates and compiles everything and announces the engine; run() serves until it is told to stop; close()
    removes the queue segment. Raises ConfigError for what the user can mend.
    """

    on_gpu = False

    def __init__(self, config: Config, on_progress: Report | None = None):
        self.config = config
        self._progress: Report = on_progress or (lambda phase, done=0, total=0: None)
        self.segment: Segment
        self.pair_memory: QueueMemory | None = None  # of the queue pairs, where it is not the segment's
        self.sizes: EngineSizes
        self.views: EngineViews
        self.state: State
        self._scheduler: Scheduler
        self._step: Step | None = None
        self._recording: RecordingMemory | None = None
        self._started = False
        self._integrity_due = 0

    def start(self) -> None:
        """Load, allocate, compile, warm up; on return the engine answers front ends once run() is called."""
        config = self.config
        policy = vetted_policy(config.scheduler.policy)
        self._progress("reading the model")
        null = config.engine.device == "null"
        weights = not null and config.model.load_format != "dummy"
        folder = resolve_model(config.model.model, weights=weights, tokenizer=False)
        architecture = read_architecture(folder)
        config = self._settle(architecture)
        page_bytes, cache_bytes = self._page_bytes(architecture)
        self.sizes = engine_sizes(config, architecture.max_position, page_bytes, cache_bytes)
        facts = self._facts(architecture)
        if not null:
            self._step = self._load_step(folder, architecture)
        self._progress("allocating queues and pages")
        limits = self._make_limits(facts)
        self.state = self._recorded(limits, make_state(limits), policy)
        self._progress("compiling the scheduler")
        self._scheduler = Scheduler(limits, self.state, policy)
        self._create_segment(facts)
        self.views = self.segment.views()
        self._scheduler.attach(self.views)
        if null:
            self._scheduler.run_null(self._made_up_tokens(), 0, 0, 0)  # compiles it; its deadline is past
        self._scheduler.turn(time.monotonic_ns())  # the first call loads what was compiled
        self.views.engine[ENGINE_STATE] = STATE_READY

    def _settle(self, architecture: Architecture) -> Config:
        """Choose the options that hang on the model, where they were left open."""
        sizes = step_sizes(self.config.scheduler, gpu=self.on_gpu, experts=any(architecture.sparse))
        self.config = self.config.with_options(sizes)
        return self.config

    def _recorded(self, limits: Limits, state: State, policy: Policy) -> State:
        """The state with a recorder in memory that others can read, if there is to be one."""
        if limits.record_turns == 0:
            return state
        facts = {
            "queue": dataclasses.asdict(self.sizes.queue),
            "device": self.config.engine.device,
            "sources": source_digest(SCHEDULER),
            **policy_facts(self.config.scheduler.policy, policy),
        }
        try:
            self._recording = RecordingMemory(limits, state, facts)
        except RecordingError as error:
            print(f"blinkpy: the flight recorder is off: {error}", file=sys.stderr, flush=True)
            return state
        recorded = state._replace(recorder=self._recording.recorder)
        self._recording.keep(recorded)
        return recorded

    def _create_segment(self, facts: EngineFacts) -> None:
        self.segment = create_segment(self.config.engine.name, self.sizes.queue, facts)
        self._started = True
        if self._recording is not None:
            self._recording.publish(self.config.engine.name)

    def _after_call(self) -> None:
        """Between a call of the scheduler and the step that it asked for."""
        if self._recording is not None:
            self._recording.keep(self.state)

    def _save_crash(self, error: BaseException) -> None:
        """Save what led to a fault, and say where."""
        if self._recording is not None and isinstance(error, Exception):
            name, folder = self.config.engine.name, crash_folder(self.config.engine.record_folder)
            with contextlib.suppress(RecordingError):
                saved = save_crash(RecordingReader(name), folder, name, f"{type(error).__name__}: {error}"[:500])
                print(f"blinkpy: {saved}", file=sys.stderr, flush=True)

    def _page_bytes(self, architecture: Architecture) -> tuple[int, int]:
        """(bytes of one page, bytes for the cache)."""
        if self.config.engine.device == "null":
            return NULL_PAGE_BYTES, NULL_PAGES * NULL_PAGE_BYTES
        from blinkpy.models.paged_cache import kv_bytes_per_page
        from blinkpy.models.weights.decoder_weights import choose_dtype

        dtype = choose_dtype(architecture, self.config.model.dtype, "cpu")
        return kv_bytes_per_page(architecture, self.config.cache.page_size, dtype), self.config.cache.cpu_cache_mib << 20

    def _load_step(self, folder: Path, architecture: Architecture) -> Step:
        import torch

        from blinkpy.models.cpu.cpu_step import CpuStep
        from blinkpy.models.weights.decoder_weights import choose_dtype, dummy_weights, load_weights

        config, sizes = self.config, self.sizes
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        dtype = choose_dtype(architecture, config.model.dtype, "cpu")
        self._progress("loading weights")
        if config.model.load_format == "dummy":
            weights = dummy_weights(architecture, config.model.seed, dtype)
        else:
            weights = load_weights(
                architecture, folder, dtype, progress=lambda share: self._progress("loading weights", share, 1)
            )
        self._progress("preparing the model's step")
        return CpuStep(architecture, weights, sizes.num_pages, sizes.page_size, sizes.max_model_len, sizes.max_num_batched_tokens)

    def _make_limits(self, facts: EngineFacts) -> Limits:
        """The scheduler's limits, from the options and what was worked out from them."""
        options = self.config.scheduler
        return make_limits(
            self.sizes.queue,
            facts,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            mixed_step_tokens=options.mixed_step_tokens,
            burst_step_tokens=options.burst_step_tokens,
            burst_tokens=options.burst_tokens,
            prefix_caching=self.config.cache.enable_prefix_caching,
            record_turns=self.config.engine.record_steps,
        )

    def _facts(self, architecture: Architecture) -> EngineFacts:
        low, high = HASH_MULTIPLIER_RANGE
        return EngineFacts(
            instance=secrets.randbits(62) | 1,
            hash_multiplier_1=low + secrets.randbelow(high - low),
            hash_multiplier_2=low + secrets.randbelow(high - low),
            max_model_len=self.sizes.max_model_len,
            vocab_size=architecture.vocab_size,
            page_size=self.sizes.page_size,
            num_pages=self.sizes.num_pages,
            max_num_seqs=self.sizes.max_num_seqs,
            lease_ms=self.config.queue.lease_ms,
        )

    def run(self) -> None:
        """Serve until stopped or drained. A fault is announced to the front ends before it is raised."""
        try:
            if self._step is None:
                self._run_null()
            else:
                self._run_steps(self._step)
        except BaseException as error:
            self._announce_fault(error)
            raise
        self.views.engine[ENGINE_STATE] = STATE_STOPPED

    def _announce_fault(self, error: BaseException) -> None:
        """Tell the front ends that the engine is gone, and keep what it recorded."""
        self.views.control[CONTROL_FAULT] = 1
        self.views.engine[ENGINE_STATE] = STATE_FAULTED
        self._save_crash(error)

    def _run_steps(self, step: Step) -> None:
        schedule, batch, requests = self._scheduler.turn, self.state.batch, self.state.requests
        always = self.config.engine.check_integrity == "always"
        idle_since, pause = 0, IDLE_SLEEP_S[0]
        while True:
            now = time.monotonic_ns()
            bucket = schedule(now)
            self._after_call()
            if always:
                self._check_integrity()
            if bucket >= 0:
                step.run(batch, requests)
                idle_since = 0
            elif bucket in (S.STOPPED, S.DRAINED):
                return
            elif idle_since == 0:
                idle_since, pause = now, IDLE_SLEEP_S[0]
            elif now - idle_since > IDLE_SPIN_NS:
                self._idle(now)
                time.sleep(pause)
                pause = min(2 * pause, IDLE_SLEEP_S[1])

    def _run_null(self) -> None:
        """The compiled loop serves while there is work; it comes back when there is none, and now and then for signals."""
        tokens = self._made_up_tokens()
        step_ns, counts = self.config.engine.null_step_us * 1000, self.state.counts
        pause = IDLE_SLEEP_S[0]
        while True:
            steps = counts[S.STEPS]
            deadline = time.monotonic_ns() + NULL_TURN_NS
            if self._scheduler.run_null(tokens, step_ns, IDLE_SPIN_NS, deadline, self._after_call) in (S.STOPPED, S.DRAINED):
                return
            if counts[S.STEPS] != steps:
                pause = IDLE_SLEEP_S[0]
                continue
            self._idle(time.monotonic_ns())
            time.sleep(pause)
            pause = min(2 * pause, IDLE_SLEEP_S[1])

    def _made_up_tokens(self) -> range:
        """What the null engine answers with. Special tokens, which have no text, come first in most vocabularies."""
        vocab = self.segment.facts.vocab_size
        return range(vocab // 16, vocab)

    def _idle(self, now: int) -> None:
        """What there is time for while nothing runs."""
        if self.config.engine.check_integrity != "never" and now >= self._integrity_due:
            self._integrity_due = now + INTEGRITY_PERIOD_NS
            self._check_integrity()

    def _check_integrity(self) -> None:
        problems = self._scheduler.check()
        if problems:
            self.views.engine[COUNTER["integrity_errors"]] += len(problems)
            raise RuntimeError("the scheduler's state is broken: " + "; ".join(problems[:5]))

    def stop(self, drain: bool = False) -> None:
        """Ask run() to return: at once, or when all accepted requests have ended. From any thread or a signal handler."""
        self.views.control[CONTROL_COMMAND] = COMMAND_DRAIN if drain else COMMAND_STOP
        if drain and self.views.engine[ENGINE_STATE] == STATE_READY:
            self.views.engine[ENGINE_STATE] = STATE_DRAINING

    def close(self) -> None:
        """Remove the segment; front ends notice."""
        if self._recording is not None:
            self._recording.close()
            self._recording = None
        if self._started:
            self.segment.close()
            self._started = False
