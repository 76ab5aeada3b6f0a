"""One load offered to one running server, with its figures; and the options for model, systems, cores and client."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import ROOT, UsageError, on_cores
from benchmarks.common.json_grammar import LONG_OBJECT
from benchmarks.common.load import LoadResult, Request, Target, offer
from benchmarks.common.model_shapes import SHAPES, write_folder
from benchmarks.common.nvml import EnergyMeter
from benchmarks.serving.load_figures import Slo, figures
from benchmarks.serving.neighbours import KINDS, Neighbours
from benchmarks.serving.systems import Cores, Model, Running, ServerError, System, find_system, parse_cores, running
from benchmarks.serving.workload import closed_loop, open_loop, read_dataset
from blinkpy.progress import Progress

START_S = 600.0  # maximum start time of a system
WARM_TOKENS = 16  # of an answer
WARM_LOADS = ((2048, 4), (128, 32))  # (longest prompt, streams): long prompts, then many at the same time
WARM_ROUNDS, WARM_LIMIT_S = 2, 60.0
DEFAULT_KINDS = ("compress", "build")
LOGS = ROOT / "build" / "benchmarks" / "logs"
MODELS = ROOT / "build" / "benchmarks" / "models"  # folders of shapes: always the same path, since servers' caches depend on it


@dataclass(frozen=True)
class Load:
    """The offered load.

    An open loop has a rate (requests per second) for some seconds, and drain_s more until the rest is cancelled. A
    closed loop has streams, each sending `rounds` requests, within seconds + drain_s. per_core: neighbours of these
    kinds on each core that the server shares. schema: all answers are JSON of one schema.
    """

    data: str
    rate: float = 0.0
    seconds: float = 60.0
    drain_s: float = 60.0
    streams: int = 0
    rounds: int = 4
    seed: int = 1
    text: bool = False
    per_core: int = 0
    kinds: tuple[str, ...] = DEFAULT_KINDS
    schema: bool = False


class Bench:
    """The resources of one run of a serving benchmark: model, systems, cores, client and meter."""

    def __init__(self, options: argparse.Namespace, model: Model, cores: Cores, meter: EnergyMeter, progress: Progress):
        self.model, self.meter, self.progress = model, meter, progress
        self.systems = [find_system(text, options.extra, options.env, options.front_end) for text in options.system]
        if len({system.name for system in self.systems}) < len(self.systems):
            raise UsageError("each system needs a name of its own")
        self.cores = cores
        self.processes = len(cores.loading) or min(4, max(1, len(cores.server) // 2))
        self.slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
        self.options = options
        if not {*cores.front_end, *cores.engine} < set(cores.server) or set(cores.front_end) & set(cores.engine):
            reason = "front ends and engine get some of the server's cores, not all, and not the same"
            raise UsageError(reason)
        self._read_dataset = functools.cache(read_dataset)
        self._log_count = 0

    def facts(self) -> dict[str, Any]:
        """The common facts of all results of a run."""
        gpu = self.meter.facts or {"missing": self.meter.missing}
        return {"model": self.model.name, "gpu": gpu, "cores": dataclasses.asdict(self.cores), "client_processes": self.processes}

    @contextlib.contextmanager
    def server(self, system: System) -> Iterator[Running]:
        """A started, healthy and warm system. Raises ServerError."""
        self._log_count += 1
        log = Path(self.options.logs) / f"{system.name}-{self._log_count}.log"
        with running(system, self.model, self.cores.of(system), log, START_S, self.progress) as server:
            self._warm_up(server)
            yield server

    def _warm_up(self, server: Running) -> None:
        for longest, streams in WARM_LOADS:
            data = f"fixed:{min(longest, self.model.length // 2)}:{WARM_TOKENS}"
            load = Load(data, streams=streams, rounds=WARM_ROUNDS, seconds=0, drain_s=WARM_LIMIT_S, text=self.options.text)
            result = self._offer(server, load, f"warming up {server.system.name}")
            if all(record.error for record in result.records):
                raise ServerError(f"{server.system.name} does not answer: {result.records[0].error}")

    def _offer(self, server: Running, load: Load, name: str) -> LoadResult:
        """Raises UsageError for an empty load."""
        data = self._read_dataset(load.data, self.model.length)
        contents = load.seed, self.model.vocabulary, load.text or self.options.chat
        if load.streams:
            requests = closed_loop(data, load.streams, load.rounds, *contents)
        else:
            requests = open_loop(data, load.rate, load.seconds, *contents)
        if not requests:
            raise UsageError(f"{name}: no request within {load.seconds:g} s; use more seconds or another seed")
        return self.offer(server, requests, load, name)

    def offer(self, server: Running, requests: list[Request], load: Load, name: str) -> LoadResult:
        """Offer requests at their times, or in the streams of the load."""
        schema = LONG_OBJECT if load.schema else None
        target = Target(server.host, server.port, self.model.name, self.options.chat, self.options.api_key, schema)
        limit = load.seconds + load.drain_s

        def tick(now: float) -> None:
            self.progress(name, max(0.0, now), load.seconds or limit)

        spin = self.cores.spare(self.processes)
        return offer(target, requests, load.streams, self.processes, self.cores.loading, limit, tick, spin)

    def measure(self, server: Running, load: Load, name: str, cores: Cores) -> dict[str, Any]:
        """The figures of a load. name: for people; cores: placement of the server. Raises UsageError as _offer(), and
        ServerError if the server has ended."""
        with Neighbours(load.kinds, load.per_core, cores.contended) as neighbours:
            result = self._offer(server, load, name)
        found = figures(result, 0.0 if load.streams else load.seconds, self.slo, self.meter)
        server.check()
        front_end = "own" if cores.front_end else "shared"
        beside = {"neighbours": neighbours.count, "neighbours_work": neighbours.work}
        return {"load": dataclasses.asdict(load), "front_end": front_end, **beside, **found}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options for model, systems, cores and client."""
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", default="demo", help=f"folder, hub id, demo, or a shape with random weights: {shapes}")
    parser.add_argument("--vocabulary", type=int, default=0, help="ids of random prompts lie below this (0: from the model)")
    parser.add_argument("--max-model-len", type=int, default=0, help="longest sequence, tokens (0: the model's, at most 8192)")
    help_text = "what to measure: a known name, NAME=KNOWN, NAME=URL or NAME=COMMAND; several times for a comparison"
    parser.add_argument("--system", action="append", default=[], metavar="SYSTEM", help=f"{help_text} (default: blinkpy)")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME:ARGUMENTS", help="more arguments for a system")
    parser.add_argument("--env", action="append", default=[], metavar="NAME:VARIABLE=VALUE", help="environment of a system")
    parser.add_argument("--server-cores", default="", metavar="LIST", help="cores of the servers, as 0-11 (default: all)")
    parser.add_argument("--client-cores", default="", metavar="LIST", help="of the client, the last one to watch (default: all)")
    parser.add_argument("--frontend-cores", default="", metavar="LIST", help="the server's cores that front ends get alone")
    help_text = "the server's cores that the engine's processes get alone, of systems that reserve cores for them"
    parser.add_argument("--engine-cores", default="", metavar="LIST", help=help_text)
    help_text = "which of a system's processes are front ends: a regular expression for their command lines"
    parser.add_argument("--front-end", action="append", default=[], metavar="NAME:PATTERN", help=help_text)
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions with texts, instead of token ids")
    parser.add_argument("--text", action="store_true", help="prompts are texts, which the server has to tokenize")
    parser.add_argument("--api-key", default=os.environ.get("BLINKPY_API_KEY", ""))
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="for goodput")
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0, help="for goodput")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=DEFAULT_KINDS, help="of neighbours")
    parser.add_argument("--logs", default=str(LOGS), metavar="FOLDER", help="where the servers' output goes")


@contextlib.contextmanager
def bench(options: argparse.Namespace, progress: Progress) -> Iterator[Bench]:
    """The resources of a benchmark, from its options."""
    lists = options.server_cores, options.client_cores, options.frontend_cores, options.engine_cores
    server, *others = map(parse_cores, lists)
    cores = Cores(server or tuple(sorted(os.sched_getaffinity(0))), *others)
    with on_cores(cores.watching), EnergyMeter() as meter:  # separate from the servers, and from the client's processes
        yield Bench(options, find_model(options), cores, meter, progress)


def find_model(options: argparse.Namespace) -> Model:
    """The model of the options; a shape is written into its folder."""
    from blinkpy.models.weights.model_folder import DEMO_FOLDER

    path, shape = options.model, options.model in SHAPES
    name = Path(path).name
    if shape:
        path = str(write_folder(name, MODELS / name))
    source = (DEMO_FOLDER if path == "demo" else Path(path)) / "config.json"
    config = json.loads(source.read_text()) if source.is_file() else {}
    length = options.max_model_len or min(8192, int(config.get("max_position_embeddings", 8192)))
    vocabulary = options.vocabulary or int(config.get("vocab_size", 0))
    if not vocabulary:
        raise UsageError("the model's vocabulary is not known: give --vocabulary")
    return Model(path, name, length, vocabulary, shape)
