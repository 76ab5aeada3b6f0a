"""Words of the loop on the GPU and columns of its trace, int64."""

# Words of the loop, int64, in GPU memory.
LOOP_BUDGET_NS = 0  # the loop ends by itself so long after its first turn; 0: never
LOOP_BEGAN_NS = 1  # clock of the first turn
LOOP_TURNS = 2
LOOP_TRACED = 3  # rows written to the trace
LOOP_RESULT = 4  # why the loop ended: STOPPED, DRAINED, or TIME_OVER
LOOP_OVERLAP_BEGIN = 5  # clock of the last `overlap`
LOOP_OVERLAP_END = 6
LOOP_COPY_GRAPH = 7  # branch of SWITCH that copies the state for the flight recorder
LOOP_COPY_AT = 8  # words recorded at which the next copy is due
LOOP_COPY_EVERY = 9  # words between two copies
LOOP_COPY_DUE = 10  # 1: before the next step
LOOP_COPIES = 11  # copies begun
LOOP_DELAYED_GRAPH = 12  # step graph that follows the copy
LOOP_PUBLISH_DUE = 13  # 1: the last turn has not published; `publish` does
LOOP_FIRST_CUT = 14  # index of the first step graph that is cut into groups
LOOP_WORDS = 15
TIME_OVER = -100

# Columns of the trace, int64, one row for each turn that made a batch. Times are of the GPU's clock, ns.
TRACE_BEGIN = 0  # the step before is complete
TRACE_END = 1  # the turn's decision is made
TRACE_GRAPH = 2
TRACE_ROWS = 3
TRACE_OVERLAP_BEGIN = 4  # of `overlap`
TRACE_OVERLAP_END = 5
TRACE_STEP_BEGIN = 6  # of the step that is complete, written by stamps; 0 without
TRACE_STEP_END = 7
TRACE_FAST_PATH = 8  # 1: it may have taken the fast path
TRACE_GROUP = 9  # the layer group that follows; 0 at the start of a step
TRACE_COLUMNS = 10
