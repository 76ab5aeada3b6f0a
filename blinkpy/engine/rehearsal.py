"""A turn that changes nothing that counts, played beside the last kernels of a step.

A step of a large model reads its weights once, and they push everything else out of the L2 cache: also the code of `turn`, which
the GPU then fetches from memory piece by piece while nothing else runs. So `turn` is launched once more, shortly before,
for a server of one request that lives here. Its short way then lies in the L2 cache when the turn that counts begins.
"""

from __future__ import annotations

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import make_state


def rehearsal_world(limits: Limits) -> tuple[Limits, State]:
    """Limits and state (NumPy arrays) of a server whose only request decodes, and whose every turn is steady: it leaves what it
    found, and wants the first bucket. limits: of the server that counts."""
    small = limits._replace(
        pairs=1, slots_per_pair=1, slots=1, rows=1, tokens=1, mixed_tokens=1, burst_step_tokens=1, pages=1, pages_per_sequence=1,
        max_model_len=2, index_items=1, index_buckets=1, ring_entries=4, record_turns=0, record_words=1,
    )  # fmt: skip
    state = make_state(small, [(1, 1)])
    state.counts[S.FAST_PATH] = state.counts[S.RUNNING_COUNT] = 1
    state.batch.counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]] = 1
    state.batch.counts[S.BUCKET] = 0
    state.forecast.rows[0, S.FORECAST_LENGTH] = 1
    return small, state
