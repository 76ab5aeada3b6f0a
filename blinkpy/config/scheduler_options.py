"""Options of the scheduler, and the sizes of steps that follow from them."""

from dataclasses import dataclass

from blinkpy.config.option_fields import ConfigError, option

STEP_TOKENS = 2048
"""Default tokens of a step, if steps have one size."""
YIELD_STEPS = 16
"""Default number of consecutive steps in which best-effort prompts wait for latency-sensitive ones."""
CUT_STEP_TOKENS, SUSPEND_STEPS = 256, 16
"""Default number of tokens up to which a step is not cut, and of steps that may interrupt one."""
NGRAM, MTP, EAGLE = "ngram", "mtp", "eagle3"
DRAFT_TOKENS, DRAFT_MATCH = {NGRAM: 7, MTP: 3, EAGLE: 3}, 8
DRAFT_REQUESTS, MOST_OF_HEAD = 64, 7
"""Defaults of speculation: drafts of a request in a step, by their origin; tokens that must repeat before a draft; maximum
running requests for drafts of a layer or a head; maximum drafts of a head."""
MOST_GROUPS = 255
"""Maximum groups of layers of a cut step: a record has a byte for their number."""


@dataclass(frozen=True)
class BatchOptions:
    """Limits of a step, of `serve` and of the simulated server of `check`."""

    max_num_seqs: int = option(256, "maximum requests per step", low=1, high=4096)
    max_num_batched_tokens: int = option(
        0,
        "maximum tokens per step, decodes and prompt chunks together (0: 8192 on a GPU, or 2048 for "
        "models with experts; on a CPU, one second of work)",
        low=0,
        high=1 << 20,
    )
    mixed_step_tokens: int = option(
        0,
        "maximum tokens of a step with decodes and prompt chunks, outside a burst (0: 512 on "
        "a GPU for models without experts, else no such limit)",
        low=0,
        high=1 << 20,
    )
    burst_tokens: int = option(
        0, "waiting prompt tokens above which a burst begins, with larger steps (0: twice burst_step_tokens)", low=0, high=1 << 24
    )
    burst_step_tokens: int = option(
        0,
        "maximum tokens of a step with decodes during a burst of long prompts (0: 2048 on a GPU for "
        "models without experts; docs/tuning.md)",
        low=0,
        high=1 << 20,
    )
    yield_steps: int = option(
        YIELD_STEPS,
        "consecutive steps, and consecutive admissions, that latency-sensitive requests may take "
        "before best effort gets one (docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_step_tokens: int = option(
        0,
        "best-effort prompts may fill a step up to this many tokens, decodes included (0: no such limit; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    sensitive_step_tokens: int = option(
        0,
        "maximum prompt tokens of a step in which best-effort prompts yield to latency-sensitive ones "
        "(0: mixed_step_tokens; docs/policies.md)",
        low=0,
        high=1 << 20,
    )
    best_effort_pages: float = option(
        1.0,
        "fraction of the KV cache's pages that best-effort requests may hold together (docs/policies.md)",
        low=0.001,
        high=1.0,
    )
    step_groups: int = option(
        1,
        "layer groups into which a step with best-effort prompts is cut; latency-sensitive prompts may "
        "suspend it between two groups (1: no cuts; docs/policies.md)",
        low=1,
        high=MOST_GROUPS,
    )
    cut_step_tokens: int = option(CUT_STEP_TOKENS, "steps with this many tokens or fewer are never cut", low=0, high=1 << 20)
    suspend_steps: int = option(SUSPEND_STEPS, "maximum steps that may run while one step is suspended", low=0, high=1 << 20)


@dataclass(frozen=True)
class SchedulerOptions(BatchOptions):
    """Batch limits, and the order in which requests are served."""

    tpot_target_ms: int = option(
        0,
        "target time per output token, in ms; while every request is ahead of it, steps are delayed to "
        "save energy (0: no delay; docs/tuning.md)",
        low=0,
        high=60_000,
    )
    flex_tpot_target_ms: int = option(
        0,
        "target time per output token of best-effort requests, in ms; not below tpot_target_ms (0: tpot_target_ms)",
        low=0,
        high=60_000,
    )
    speculative: str = option(
        "off",
        "source of drafts of the next tokens, which never change the output; ngram: earlier tokens of the request; mtp: the "
        "checkpoint's draft layer; eagle3: the head of --speculative-model (docs/speculation.md)",
        choices=("off", NGRAM, MTP, EAGLE),
    )
    speculative_tokens: int = option(
        0, "maximum drafts of a request in one step, with --speculative (0: 7 with ngram, otherwise 3)", low=0, high=31
    )
    speculative_match: int = option(
        DRAFT_MATCH, "tokens that must repeat before a request gets drafts, with --speculative ngram", low=2, high=64
    )
    speculative_requests: int = option(
        0,
        "maximum running requests that get drafts, with --speculative; if more run, none gets drafts "
        "(0: no limit with ngram, otherwise 64, chosen for an 8B model)",
        low=0,
        high=1 << 20,
    )
    policy: str = option(
        "short-prompts",
        "scheduling policy: fair, fcfs, priority, short-prompts, shortest-first, or FILE.py:FUNCTION (docs/policies.md)",
    )

    @property
    def draft_tokens(self) -> int:
        """Maximum drafts of a request in one step; 0: no drafts."""
        return self.speculative_tokens or DRAFT_TOKENS.get(self.speculative, 0)

    @property
    def draft_requests(self) -> int:
        """Maximum running requests for drafts; 0: no limit."""
        return self.speculative_requests or (DRAFT_REQUESTS if self.speculative in (MTP, EAGLE) else 0)


TARGETS = ("tpot_target_ms", "flex_tpot_target_ms")


def check_step_sizes(options: BatchOptions, *, settled: bool = True) -> None:
    """Raise ConfigError unless the step sizes are consistent. settled: whether defaults have replaced all zeros."""
    rows, most = options.max_num_seqs, options.max_num_batched_tokens
    mixed, burst_step = options.mixed_step_tokens, options.burst_step_tokens
    if 0 < most < rows:
        raise ConfigError(
            f"max_num_batched_tokens ({most}) must be at least max_num_seqs ({rows}): every running sequence gets a token in "
            "each step"
        )
    limit = most or 1 << 20
    if mixed and not 2 * rows <= mixed <= limit:
        raise ConfigError(
            f"mixed_step_tokens ({mixed}) must be at least twice max_num_seqs ({rows}), since half of a step is for prompts, and "
            f"at most max_num_batched_tokens ({most})"
        )
    if burst_step and not 0 < (mixed or int(not settled)) <= burst_step <= limit:
        raise ConfigError(
            f"burst_step_tokens ({burst_step}) needs mixed_step_tokens ({mixed}), and must be at least as much, and at most "
            f"max_num_batched_tokens ({most})"
        )


def check_class_sizes(options: BatchOptions) -> None:
    """Raise ConfigError unless the prompts of each class fit into the steps that are permitted to them."""
    rows, most = options.max_num_seqs, options.max_num_batched_tokens
    limit, share = most or 1 << 20, options.best_effort_step_tokens
    if options.sensitive_step_tokens > limit:
        raise ConfigError(
            f"sensitive_step_tokens ({options.sensitive_step_tokens}) must be at most max_num_batched_tokens ({most})"
        )
    if share and not 2 * rows <= share <= limit:
        raise ConfigError(
            f"best_effort_step_tokens ({share}) must be at least twice max_num_seqs ({rows}), since half of a step is for "
            f"prompts, and at most max_num_batched_tokens ({most})"
        )


def check_targets(options: SchedulerOptions) -> None:
    """Raise ConfigError if the target of best-effort requests is shorter than the general target."""
    target, flex = options.tpot_target_ms, options.flex_tpot_target_ms
    if 0 < flex < target:
        raise ConfigError(f"flex_tpot_target_ms ({flex}) must be at least tpot_target_ms ({target})")


def check_drafts(options: SchedulerOptions) -> None:
    """Raise ConfigError for sizes of drafts without an effect, or if no step has a row for a draft."""
    tokens, match = options.speculative_tokens, options.speculative_match
    if options.speculative == "off" and tokens:
        raise ConfigError(f"speculative_tokens ({tokens}) has no effect without drafts: set speculative to ngram, mtp or eagle3")
    if options.speculative == "off" and options.speculative_requests:
        raise ConfigError(
            f"speculative_requests ({options.speculative_requests}) has no effect without drafts: "
            "set speculative to ngram, mtp or eagle3"
        )
    if options.speculative != NGRAM and match != DRAFT_MATCH:
        raise ConfigError(
            f"speculative_match ({match}) has no effect with speculative {options.speculative}: set speculative to ngram"
        )
    if options.speculative == "off":
        return
    if options.speculative == EAGLE and tokens > MOST_OF_HEAD:
        raise ConfigError(f"speculative_tokens ({tokens}) must be at most {MOST_OF_HEAD} with speculative {EAGLE}")
    if options.max_num_seqs < 2:
        raise ConfigError(f"speculative {options.speculative} needs max_num_seqs of at least 2: drafts use the rows left over")


def step_sizes(options: SchedulerOptions, *, gpu: bool, experts: bool, tokens: int = STEP_TOKENS) -> dict[str, int]:
    """The options for the sizes of steps, with defaults filled in. Raises ConfigError if no such sizes fit
    the given options.

    experts: whether the model has experts.
    tokens: default size, if steps have one size.

    docs/tuning.md explains the sizes on a GPU. Steps have one size in these cases:
    - on other devices, because a step of thousands of tokens takes seconds
    - with experts, because a few hundred tokens use all of them, so small chunks cost nearly as much as large
      ones
    - if prompts would get less than half of a small step
    """
    rows, mixed, burst_step = options.max_num_seqs, options.mixed_step_tokens, options.burst_step_tokens
    several = gpu and not experts
    most = options.max_num_batched_tokens or max(rows, mixed, burst_step, 8192 if several else tokens)
    if several and not mixed and most > max(512, 2 * rows):
        mixed = max(512, 2 * rows)
    if gpu and mixed and not burst_step:
        burst_step = min(most, max(2048, mixed))
    sizes = {"max_num_batched_tokens": most, "mixed_step_tokens": mixed, "burst_step_tokens": burst_step}
    check_step_sizes(BatchOptions(max_num_seqs=rows, **sizes))
    return sizes
