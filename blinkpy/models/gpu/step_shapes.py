"""The step graphs: shapes of batches, each with and without prefill chunks. Pure arithmetic."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.limits import groups_of_step

SMALLEST_MIXED = 64
"""Tokens of the smallest graph with prefill attention; smaller mixed batches run in it."""
SPACING = 64
"""Up to 128 tokens there is a bucket at each power of two; above, at each multiple of this and of an eighth of the power of two
below it. A mixed step takes as long as its bucket: at two buckets an octave, a prompt of 1,050 tokens waits for 1,536."""


@dataclass(frozen=True)
class StepShape:
    """The shape for which a step graph is captured.

    tokens, rows: maximum tokens and rows.
    mixed: it has prefill chunks.
    drafted: rows have one token each, and one request may have several rows (docs/speculation.md).
    whole: the last layer computes every token.
    groups: layer groups; each has a separate graph, after which the step may be suspended.
    returns_drafts: a draft layer or head makes drafts. Otherwise it only writes its keys and values.
    """

    tokens: int
    rows: int
    mixed: bool
    whole: bool = False
    groups: int = 1
    drafted: bool = False
    returns_drafts: bool = True

    @property
    def name(self) -> str:
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{'mixed' if self.mixed else 'drafted' if self.drafted else 'decode'} {self.tokens}x{self.rows}{groups}"

    @property
    def last_tokens_only(self) -> bool:
        """Whether the last layer, after caching keys and values, continues only with each row's last token."""
        return self.mixed and self.rows < self.tokens and not self.whole


def bucket_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int]]:
    """(tokens, rows) of each bucket, ascending; the last is the largest batch. For
    blinkpy.kv.state_memory.make_state.
    """
    sizes, n = {max_num_seqs, max_num_batched_tokens}, 1
    while n < max_num_batched_tokens:
        sizes.add(n)
        n += n if n < 2 * SPACING else max(SPACING, 1 << (n.bit_length() - 4))
    return [(tokens, min(tokens, max_num_seqs)) for tokens in sorted(sizes)]


def most_groups(layers: int, *, bare: bool = False) -> int:
    """Maximum groups of a step with this number of layers; a group has at least one block (see
    blocks_of_group).

    bare: whether some layers have no MLP. A block may then be empty, so a group has at least two blocks.
    """
    blocks = 2 * layers - 1
    return max(1, blocks // 2) if bare else blocks


def blocks_of_group(layers: int, groups: int, group: int) -> range:
    """The blocks of a step's layer group. Block 2 i is layer i's attention, 2 i + 1 its MLP. The last layer's two blocks form one
    block, because their intermediate result may be in memory that all steps share.
    """
    blocks = most_groups(layers)
    return range(blocks * group // groups, blocks * (group + 1) // groups)


def mlp_follows(layers: int, groups: int, group: int) -> bool:
    """Whether the next group of a step begins with an MLP."""
    return blocks_of_group(layers, groups, group).stop % 2 == 1


def step_shapes(
    buckets: list[tuple[int, int]], *, whole: bool = False, groups: int = 1, cut_tokens: int = 0, drafts: int = 0
) -> tuple[list[StepShape], NDArray[np.int32]]:
    """The step graphs for the buckets, and the table int32 [buckets, kinds] from a bucket and the kind of a batch
    (blinkpy.kv.limits.step_kind) to the index of a graph.

    whole: StepShape.whole of all shapes.
    groups, cut_tokens: see Limits. Graphs of cut batches come after all others.
    drafts: maximum running requests for drafts; 0: chunks of one token run in the graphs of mixed batches. Larger batches of
        decode rows return no drafts.

    Batches of decode rows and of drafts have equal numbers of tokens and rows, so they never need more tokens
    than the largest number of rows. If a bucket has no graph for a kind of batch, the table has the index of another graph of
    the bucket, or 0 if no batch is cut.
    """
    most_rows = buckets[-1][1]
    shapes: list[StepShape] = []
    table = np.zeros((len(buckets), len(S.STEP_KINDS)), np.int32)
    for index, (tokens, rows) in enumerate(buckets):
        if tokens <= most_rows:
            smallest = buckets[index - 1][1] + 1 if index else 1
            shapes.append(StepShape(tokens, rows, mixed=False, whole=whole, returns_drafts=not 0 < drafts < smallest))
        table[index, S.DECODE_STEP] = len(shapes) - 1
    wanted = [i for i, (tokens, _) in enumerate(buckets) if tokens >= SMALLEST_MIXED] or [len(buckets) - 1]
    for index in wanted:
        shapes.append(StepShape(*buckets[index], mixed=True, whole=whole))
        table[index, S.MIXED_STEP] = len(shapes) - 1
    for index in range(wanted[0]):
        table[index, S.MIXED_STEP] = table[wanted[0], S.MIXED_STEP]
    table[:, S.DRAFTED_STEP] = table[:, S.MIXED_STEP]
    for index, (tokens, rows) in enumerate(buckets):
        if drafts and tokens <= most_rows:
            shapes.append(StepShape(tokens, rows, mixed=False, whole=whole, drafted=True))
            table[index, S.DRAFTED_STEP] = len(shapes) - 1
    for index, (tokens, _) in enumerate(buckets):
        own = groups_of_step(groups, tokens, buckets[-1][0])
        if tokens > cut_tokens and own > 1:  # the scheduler cuts a batch by its bucket, even if a larger graph runs it
            shapes.append(StepShape(*buckets[max(index, wanted[0])], mixed=True, whole=whole, groups=own))
            table[index, S.CUT_STEP] = len(shapes) - 1
    return shapes, table
