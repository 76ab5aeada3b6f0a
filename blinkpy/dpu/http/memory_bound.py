"""An upper bound of a worker's memory, from its options."""

from blinkpy.config import Config
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.descriptors import SPARE_CONNECTIONS
from blinkpy.dpu.http.preparation.preparation_queue import body_budget
from blinkpy.dpu.http.wire.request_reader import BODY_SLICE, HIGH_WATER

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
