"""Where the simulator finds the seeded bugs that it does not find at once: hunts look there first.

A seed that no longer finds its bug costs time alone, for the hunt then begins at the first one: tools/write_finding_seeds.py
writes this file again. What a test says of a bug that is found begins with its seed.
"""

# fmt: off
FINDING_SEEDS: dict[str, int] = {what: seed for seed, bugs in {
    2: (
        "the salt of a hit is not compared",
        "the parent of a hit is not compared",
        "a turn between two groups leaves no record",
        "the tokens of a step are written down behind each group",
        "a step that goes on is written down as a new one",
        "tokens count as computed behind each group",
        "a group is left out",
        "requests stay in flight behind their step",
        "requests of a step that ended are in flight",
        "a small step is cut into as many groups as the largest",
        "steps without best effort are cut",
        "requests without a rank are left behind",
    ),
    3: (
        "compaction loses a page",
        "an entry of an earlier epoch is accepted",
        "a slot out of range is accepted",
        "who is latency-sensitive gives way to best effort that has its pages",
        "pages are given behind each group",
        "tokens come behind each group",
        "one that just entered enters again",
        "a step is suspended for who finds no row",
        "a step is suspended for who finds no pages",
        "a long prompt fills the step of those that end",
        "policies see no class",
    ),
    5: (
        "a grammar stays in its state",
        "the completions of a fifth pair are not numbered",
        "who has no rank yet is no floor of the service",
        "best-effort prompts beyond their share take the budget of others",
        "a late request does not catch up",
        "latency-sensitive requests have best effort's pace",
        "best effort's pace alone measures no step",
        "decodes take nothing of the share of best effort",
        "policies see no service of tenants",
    ),
    6: (
        "an automaton leads out of its states",
        "a prompt token of no vocabulary is accepted",
        "a usual turn has no pace",
        "a step begins when its tokens are due",
        "every step counts as held for a whole pace",
    ),
    7: (
        "the tokens of a hit are not compared",
    ),
    9: (
        "another tenant pays",
    ),
    10: (
        "a request that can't fit is accepted",
    ),
    11: (
        "best effort that has its pages keeps all others waiting",
        "best effort keeps no page for those of it that run",
        "who is admitted of best effort takes the budget of others",
        "decodes leave best effort all of its share",
        "a request whose reader is slow hurries all steps",
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
        "steps that interrupt count as turns of yielding",
        "a best-effort prompt has a part although it yields",
        "a request in flight has a part in a step that interrupts its own",
    ),
    12: (
        "claims are granted at any rate",
        "best effort is admitted although its share of the step is taken",
        "who is admitted takes nothing of the share of best effort",
        "who is ahead waits for longer than a pace",
        "one slow step counts for ever",
        "a very slow step counts for long",
        "each best-effort prompt has the share of all",
    ),
    14: (
        "the grammar of a waiting request is written over",
        "token rules of a waiting request are written over",
        "who had wrong drafts does not rest",
        "a grammar stays in its state in a usual turn",
        "a usual turn does not see the last token of a request",
        "a usual turn's tokens are published again",
        "the tail stays behind a usual turn's tokens",
    ),
    16: (
        "token rules take the place of their request's grammar",
        "a queue pair is lost between two groups of a step",
        "who decodes takes no tokens before a latency-sensitive prompt",
        "best-effort requests have the others' pace",
        "best effort's pace alone holds no step",
        "a stop ends the loop while a step is suspended",
        "who decodes has no part in a step that interrupts",
    ),
    17: (
        "an automaton leads out of its classes",
    ),
    18: (
        "rules that allow nothing are accepted",
        "pages of best effort are not counted",
    ),
    19: (
        "a bias of no number is accepted",
        "a step is cut that is short",
    ),
    20: (
        "what a suspended step needs of a completion queue is free",
    ),
    22: (
        "new requests are taken in while draining",
    ),
    25: (
        "the last token of a usual turn is not published",
    ),
    26: (
        "a banned token of no vocabulary is accepted",
        "best effort grows beyond its pages",
        "who is latency-sensitive makes room for best effort",
        "best effort that waits for its class bars others",
        "best effort grows beyond its pages during a step",
        "two requests of best effort may hold all pages",
    ),
    28: (
        "a token of no vocabulary goes on",
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
        "a request in flight gives way as if it stalled",
        "a usual turn is taken while a step is suspended",
    ),
    52: (
        "drafts never become fewer",
    ),
    81: (
        "a step is suspended for who may not pass",
    ),
    82: (
        "a step is suspended although the engine stops",
    ),
    179: (
        "a usual turn keeps the count of who passed best effort",
    ),
}.items() for what in bugs}
