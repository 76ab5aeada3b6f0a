"""Where the simulator finds the seeded bugs that it does not find at once: hunts look there first.

A seed that no longer finds its bug costs time alone, for the hunt then begins at the first one. What a test says of a bug that is
found begins with its seed.
"""

# fmt: off
FINDING_SEEDS: dict[str, int] = {what: seed for seed, bugs in {
    3: (
        "compaction loses a page",
        "best effort grows beyond its pages",
        "who is latency-sensitive makes room for best effort",
        "a request in flight gives way as if it stalled",
        "an entry of an earlier epoch is accepted",
        "a slot out of range is accepted",
        "a prompt token of no vocabulary is accepted",
        "who is latency-sensitive gives way to best effort that has its pages",
        "best effort keeps no page for those of it that run",
        "best effort is admitted although its share of the step is taken",
        "two requests of best effort may hold all pages",
        "best effort grows beyond its pages during a step",
        "pages are given behind each group",
        "tokens come behind each group",
        "a step is resumed with the group that ran last",
        "a step is resumed behind its next group",
        "a suspended step's tokens are not restored",
        "a suspended step's cache slots are not restored",
        "a suspended step's padding is not restored",
        "the end of a suspended step's last row is lost",
        "nothing of a completion queue is kept for a suspended step",
        "what was kept for a suspended step stays kept",
        "one step more than the bound interrupts",
        "steps that interrupt are not counted",
        "a suspended step stays so while nobody interrupts it",
        "a step is suspended for who finds no row",
        "a step is suspended for who finds no pages",
        "steps that interrupt count as turns of yielding",
        "a request in flight has a part in a step that interrupts its own",
        "latency-sensitive prompts have chunks in the order of their begin",
        "who decodes has no part in a step that interrupts",
        "policies see no class",
    ),
    4: (
        "who has no rank yet is no floor of the service",
        "new requests are taken in while draining",
        "a step begins when its tokens are due",
    ),
    5: (
        "a grammar stays in its state",
        "the completions of a fifth pair are not numbered",
        "best-effort prompts beyond their share take the budget of others",
        "decodes leave best effort all of its share",
        "another tenant pays",
        "policies see no service of tenants",
        "latency-sensitive requests have best effort's pace",
        "best effort's pace alone measures no step",
    ),
    6: (
        "an automaton leads out of its states",
        "an automaton leads out of its classes",
        "a bias of no number is accepted",
        "a banned token of no vocabulary is accepted",
        "rules that allow nothing are accepted",
        "a request that can't fit is accepted",
        "a usual turn has no pace",
        "a late request does not catch up",
        "every step counts as held for a whole pace",
    ),
    7: (
        "the tokens of a hit are not compared",
    ),
    8: (
        "claims are granted at any rate",
        "who is admitted takes nothing of the share of best effort",
        "each best-effort prompt has the share of all",
    ),
    9: (
        "a best-effort prompt has a part although it yields",
    ),
    11: (
        "best effort that waits for its class bars others",
        "token rules of a waiting request are written over",
        "a queue pair is lost between two groups of a step",
        "a stop ends the loop while a step is suspended",
        "best effort's pace alone holds no step",
        "best-effort requests have the others' pace",
    ),
    12: (
        "steps wait although a prompt waits",
        "who is ahead waits for longer than a pace",
        "one slow step counts for ever",
        "a request whose reader is slow hurries all steps",
        "a very slow step counts for long",
        "a step is cut that is short",
    ),
    13: (
        "a grammar begins anew behind a preemption",
    ),
    14: (
        "a usual turn's tokens are published again",
        "the tail stays behind a usual turn's tokens",
        "a grammar stays in its state in a usual turn",
        "a usual turn does not see the last token of a request",
        "the grammar of a waiting request is written over",
        "the last token of a usual turn is not published",
    ),
    16: (
        "token rules take the place of their request's grammar",
        "who decodes takes no tokens before a latency-sensitive prompt",
    ),
    20: (
        "what a suspended step needs of a completion queue is free",
    ),
    26: (
        "a usual turn keeps the count of turns of yielding",
    ),
    29: (
        "a cancel takes the pages of a request in flight",
    ),
    35: (
        "a drain ends while a step is suspended",
    ),
    37: (
        "the output goes on behind its end",
    ),
    45: (
        "a usual turn is taken while a step is suspended",
    ),
    52: (
        "a step is suspended for who may not pass",
    ),
    82: (
        "a step is suspended although the engine stops",
    ),
}.items() for what in bugs}
