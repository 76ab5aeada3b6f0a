"""The words of a segment, int64 each: indices into the blocks of the engine, the host and each queue pair, and their values."""

# Front-end region, int64. Words that change together are neighbours, so that one RDMA write covers them.
FRONT_DOORBELL = 0  # epoch << 32 | submission tail (entries, modulo 2**32)
FRONT_CQ_HEAD = 1  # epoch << 32 | completions read (modulo 2**32)
FRONT_HEARTBEAT = 2  # changes at least once a lease
FRONT_CLAIM = 3  # epoch that the front end asks for: the granted one + 1

# Engine region, int64.
PAIR_SQ_HEAD = 0  # entries consumed since the segment was made
PAIR_CQ_TAIL = 1  # completions published since the segment was made
PAIR_EPOCH = 2  # the granted epoch
PAIR_ATTACHED = 3  # 1 while that epoch is live, 0 once it is revoked

EPOCH_SHIFT = 32
POSITION_MASK = 0xFFFFFFFF
EPOCH_LIMIT = 0x7FFFFFFF

# Engine block, int64. Counters count since the start; gauges are as of the last step.
ENGINE_STATE = 0  # STATE_*
ENGINE_HEARTBEAT = 1  # turns of the loop, idle ones included
ENGINE_STEPS = 2
ENGINE_TIME_NS = 3  # the engine's clock at the last turn
ENGINE_POLICY_FAULT = 4  # the policy's latest fault, as of scheduler.policy_fault
ENGINE_PROGRESS = 5  # advances during a long step that the host drives, when the heartbeat stands still
COUNTER_NAMES = (
    "requests_accepted",
    "requests_rejected",
    "requests_finished",
    "requests_cancelled",
    "prompt_tokens",
    "generated_tokens",
    "computed_tokens",
    "prefix_lookup_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "evictions",
    "leases_expired",
    "stale_entries",
    "reader_stalls",
    "integrity_errors",
    "grammars_installed",
    "grammars_reused",
    "policy_faults",
    "paced_ns",
    "suspensions",
)
GAUGE_NAMES = ("requests_running", "requests_waiting", "pages_free", "pages_cached", "pages_held", "batch_rows", "batch_tokens")
ENGINE_COUNTERS = 16  # index of the first counter
ENGINE_GAUGES = 64  # index of the first gauge
COUNTER = {name: ENGINE_COUNTERS + i for i, name in enumerate(COUNTER_NAMES)}
GAUGE = {name: ENGINE_GAUGES + i for i, name in enumerate(GAUGE_NAMES)}

STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_STOPPED, STATE_FAULTED = range(5)
STATE_NAMES = ("starting", "ready", "draining", "stopped", "faulted")

# Control block, int64, written by the host alone.
CONTROL_COMMAND = 0  # COMMAND_*
CONTROL_FAULT = 1  # 1: the host saw the engine die
COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP = range(3)
