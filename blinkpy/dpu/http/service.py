"""The parts that the requests of a worker share: model, admission, gate, preparation, grammars and stored responses."""

import secrets
import time
from pathlib import Path
from typing import Any

from blinkpy.config import Config
from blinkpy.dpu.admission.admission import Admission
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.gate import Asker, Gate
from blinkpy.dpu.admission.keys_file import keys_of
from blinkpy.dpu.admission.tenant_table import TenantTable
from blinkpy.dpu.api_errors import ApiError, busy
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.grammar.grammar_compiler import GrammarBusyError, GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.preparation.preparation_queue import PreparationQueue
from blinkpy.dpu.http.preparation.request_jobs import EngineLimits, RequestReader
from blinkpy.dpu.http.stored_responses import ResponseStore
from blinkpy.dpu.metrics import Metrics


class Service:
    """Model name, tokenizer, template, defaults and admission of one worker. secret: the server's secret, for salts of the prefix
    cache; default: a new one. Raises ConfigError for a folder or keys that can't be used."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: Engines,
        metrics: Metrics,
        tenants: TenantTable | None = None,
        secret: bytes = b"",
    ):
        self.engine, self.metrics = engine, metrics
        keys = keys_of(config, secret or secrets.token_bytes(32))
        options = config.extension(AdmissionOptions)
        self.admission = Admission(
            options, keys, tenants or TenantTable(), metrics, engine.free_slots, places=self._grammar_places, slots=self._slots
        )
        engine.on_space, engine.on_failure = self.admission.admit, self.admission.refuse_all
        self.started = int(time.time())
        self.reader = RequestReader(config, folder)
        self.tokenizer, self.dialect = self.reader.tokenizer, self.reader.dialect
        self.model = self.reader.model
        stored = config.frontend.response_store_mib << 20
        self.responses = ResponseStore(stored, config.frontend.response_store_count) if stored else None
        self._queue = PreparationQueue(self.reader, config, folder, metrics)
        frontend = config.frontend
        self.gate = Gate(frontend.max_lag_ms / 1000, metrics, self._streaming)
        compile_s, compile_bytes = frontend.grammar_compile_ms / 1000, frontend.grammar_compile_mib << 20
        self._grammars = GrammarCompiler(
            compile_s, compile_bytes, frontend.grammar_cache_mib << 20, frontend.grammar_digits, self.tokenizer.spells_bytes
        )

    def _streaming(self) -> bool:
        pair = self.engine.pair
        return pair is not None and pair.in_flight > 0

    def _slots(self) -> int:
        return sum(pair.sizes.slots for pair in self.engine.pairs())

    def _grammar_places(self) -> tuple[set[int], int]:
        """Names of the grammars and token rules in flight, and the limit of each engine."""
        pairs = self.engine.pairs()
        most = min((pair.facts.grammar_share for pair in pairs), default=0)
        return set().union(*(pair.names_in_flight() for pair in pairs)), most

    def end_preparations(self) -> None:
        """Refuse requests that wait for preparation with status 503."""
        self._queue.refuse()

    def start_children(self) -> None:
        """Start the processes for large bodies and for grammars, from the same version of the files as this worker."""
        self._queue.start()
        self._grammars.start()

    def close(self) -> None:
        """End threads and processes."""
        self._queue.close()
        self._grammars.close()

    def limits(self) -> EngineLimits:
        """The limits of prompts. Raises ApiError with status 503 without an engine."""
        pair = self.engine.require()
        return EngineLimits(pair.context, pair.facts.vocab_size)

    async def prepare(self, kind: str, body: bytearray, limits: EngineLimits, asker: Asker) -> Any:
        """Run one of JOBS without blocking the event loop, and return its result. Cancelling this cancels the job.

        Raises ApiError.
        """
        return await self._queue.run(kind, body, limits, asker)

    def needs_automaton(self, request: Request) -> bool:
        """Whether the request's grammar must be compiled: an optional grammar is used only if the engine supports
        grammars."""
        grammar = request.grammar
        return grammar is not None and (grammar.needed or self.engine.require().facts.grammar_share > 0)

    async def compile_grammar(self, request: Request, asker: Asker) -> None:
        """Set the automaton of the request's grammar. Raises ApiError with status 400, or 429 if too many grammars
        wait."""
        field = request.grammar
        if field is None:
            return
        try:
            request.automaton = await self._grammars.automaton(field.grammar, asker)
        except GrammarError as error:
            param, message = error.with_param(field.param)
            raise ApiError(400, message, param=param, code="invalid_grammar", limit=error.limit) from error
        except GrammarBusyError as error:
            raise busy("too many grammars are waiting for compilation; try again") from error
