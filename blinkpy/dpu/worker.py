"""A front-end worker process: its queue pairs, event loop and HTTP server."""

import logging
import mmap
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

from blinkpy.config import Config
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.tenant_table import TABLE_BYTES, TenantTable
from blinkpy.dpu.descriptors import SPARE_CONNECTIONS, allowed_connections
from blinkpy.dpu.engine_starts import EngineEntry, EngineStarts, map_starts
from blinkpy.dpu.fleet.engine_list import EnginesFile, engine_configs
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.fleet.fleet_options import FleetOptions
from blinkpy.dpu.fleet.identity import IdentityCheck, tokenizer_digest
from blinkpy.dpu.fleet.placement_rules import load_rule
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.http_server import Server
from blinkpy.dpu.http.preparation.preparation_queue import body_budget
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.http.wire.request_reader import BODY_SLICE, HIGH_WATER
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.link.link_thread import WORDS_BYTES, LinkThread
from blinkpy.dpu.metrics import BLOCK_BYTES, Metrics
from blinkpy.dpu.watch.energy_meter import EnergyMeter, start_energy_meter
from blinkpy.dpu.watch.log_output import end_logging, start_logging
from blinkpy.process_exit import end_within, exit_process
from blinkpy.processes import Reporter, child_main
from blinkpy.transport.contract import WorkerIdentity
from blinkpy.transport.handshake import new_owner

BASE_BYTES = 256 << 20  # interpreter, libraries, tokenizer
CONNECTION_BYTES = 1 << 15  # objects of a connection and its request
SLOT_BYTES = 1 << 17  # objects and uncounted text of a choice
TOKEN_BYTES = 4  # of a waiting prompt


def worker_memory_bytes(config: Config) -> int:
    """The maximum memory of one worker, without its child processes, which have separate limits."""
    options = config.frontend
    connections = options.max_connections + SPARE_CONNECTIONS
    a_connection = CONNECTION_BYTES + 2 * options.max_header_bytes + HIGH_WATER + BODY_SLICE
    parts = (
        BASE_BYTES,
        connections * a_connection,
        3 * body_budget(options),  # arriving bodies, and those in the queues for threads and for processes
        options.unread_budget_mib << 20,
        2 * (options.answer_budget_mib << 20),  # retained values, and the JSON made of them
        options.grammar_cache_mib << 20,
        options.response_store_mib << 20,
        config.worker_slots * SLOT_BYTES,
        config.extension(AdmissionOptions).max_waiting_tokens * TOKEN_BYTES,
    )
    return sum(parts)


logger = logging.getLogger("blinkpy.frontend")

MOST_END_S = 6.0  # in addition to shutdown_s, before the kernel ends a worker whose supervisor died
SWITCH_S = 0.0005  # interpreter's switch interval, so that long preparations don't delay the event loop


def make_server(
    config: Config,
    pair: int,
    folder: Path,
    memory: memoryview | None = None,
    on_ready: Callable[[], None] = lambda: None,
    owner: int = 0,
    on_drained: Callable[[], None] | None = None,
    starts: Sequence[EngineStarts] = (),
    secret: bytes = b"",
    heir: bool = False,
) -> Server:
    """Create the server of one worker. It answers 503 until an engine is connected.

    pair: index of the worker and of its queue pairs.
    folder: the model's folder.
    memory: shared with blinkpy.dpu.supervisor; None for a single worker.
    on_ready: called when the server listens.
    owner: the worker's identity for engines on other machines; 0 chooses a new one.
    on_drained, heir: see Server.
    starts: number of starts of each engine; empty if unknown.
    secret: see Service.
    Raises ConfigError for an unusable model or keys file.
    """
    workers = config.frontend.workers
    parts = accumulate((workers * size for size in (BLOCK_BYTES, TABLE_BYTES, WORDS_BYTES)), initial=0)
    shared = [memory and memory[begin:end] for begin, end in pairwise(parts)]
    metrics, tenants = Metrics(pair, workers, shared[0]), TenantTable(pair, workers, shared[1])
    words = shared[2] and shared[2][pair * WORDS_BYTES : (pair + 1) * WORDS_BYTES]
    thread = LinkThread(words, config.frontend.worker_hang_s)
    engines = _make_engines(config, folder, WorkerIdentity(pair, owner or new_owner()), metrics, starts, thread)
    service = Service(config, folder, engines, metrics, tenants, secret)
    engines.moves.pieces = lambda: service.tokenizer.pieces_in_grammars
    return Server(App(service, config), config.access, on_ready, on_drained, heir)


def _make_engines(
    config: Config,
    folder: Path,
    worker: WorkerIdentity,
    metrics: Metrics,
    starts: Sequence[EngineStarts],
    thread: LinkThread,
) -> Engines:
    options, configs = config.extension(FleetOptions), engine_configs(config)
    several = len(configs) != 1 or bool(options.engines_file)
    same = IdentityCheck(tokenizer_digest(folder))

    def entry(label: str, link_config: Config, own_starts: EngineStarts | None = None) -> EngineEntry:
        check = (partial(same.check, label),) if several else ()
        return EngineEntry(label, lambda: open_queue_pair(link_config, worker, *check), own_starts)

    each: Sequence[EngineStarts | None] = starts or [None] * len(configs)
    entries = [entry(label, link_config, own) for (label, link_config), own in zip(configs.items(), each, strict=True)]
    file = EnginesFile(config, entry) if options.engines_file else None
    return Engines(
        entries if file is None else file.entries,
        metrics,
        several,
        thread,
        rule=load_rule(options.placement),
        most_moves=options.max_moves,
        move_timeout_s=options.move_timeout_s,
        watch=None if file is None else file.watch,
    )


def may_meter(config: Config) -> bool:
    """Whether the engine may use a GPU of this machine."""
    return config.transport.transport == "shm" and config.engine.device in ("auto", "cuda")


def serve_worker(
    config: Config,
    reporter: Reporter,
    pair: int,
    owner: int,
    secret: bytes,
    listen_fd: int,
    memory_fd: int,
    starts_fd: int,
    folder: str,
    heir: bool,
) -> int:
    """Main function of a worker: serve on a listening socket until SIGTERM or SIGINT.

    starts_fd: see EngineStarts; -1 without it.
    folder: the model's folder, for its tokenizer.
    heir: see Server.
    """
    start_logging(f"frontend/{pair}", config.frontend.log_level, config.watch.log_format)
    sys.setswitchinterval(SWITCH_S)
    allowed = allowed_connections(config.frontend.max_connections)
    config = replace(config, frontend=replace(config.frontend, max_connections=allowed))
    if pair == 0:
        logger.info("each worker takes at most %d MiB of memory with these options", worker_memory_bytes(config) >> 20)

    def ready() -> None:
        reporter.ready(attached=server.app.service.engine.pair is not None)
        server.app.service.start_children()

    with socket.socket(fileno=listen_fd) as sock:
        memory = memoryview(mmap.mmap(memory_fd, 0))
        starts = [] if starts_fd < 0 else [map_starts(starts_fd, engine) for engine in range(len(engine_configs(config)))]
        server = make_server(config, pair, Path(folder), memory, ready, owner, reporter.drained, starts, secret, heir)
        signal.signal(signal.SIGHUP, lambda *_: server.hang_up())
        signal.signal(signal.SIGUSR1, lambda *_: server.retire())
        server.on_end = partial(end_within, config.frontend.shutdown_s + MOST_END_S)
        energy = start_energy_meter(server.app.service.metrics) if pair == 0 and may_meter(config) else None
        server.on_ended = lambda: _end(server, energy)
        server.run(sockets=[sock])
    return 1 if server.failed else 0


def _end(server: Server, energy: EnergyMeter | None) -> NoReturn:
    """End the process without waiting for its threads, which may never end (while connecting to an
    engine).
    """
    if energy is not None:
        energy.stop()
    end_logging()
    exit_process(1 if server.failed else 0)


if __name__ == "__main__":
    sys.exit(child_main({"worker": serve_worker}, sys.argv[1], int(sys.argv[2])))
