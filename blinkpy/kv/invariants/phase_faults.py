"""The conditions that phases of a turn check with expect (blinkpy/device/expect.py), by phase."""

from blinkpy.device.expect import fault_code

# inbox
UNRANKED_LEFT = fault_code("the last turn left requests without a rank")
LISTED_IDLE = fault_code("a listed request neither runs nor waits")
# ownership
SUBMISSIONS_BEYOND = fault_code("more submission entries are announced than the ring holds")
COMPLETIONS_BEYOND = fault_code("more completions are unread than the ring holds")
GRANT_SKIPS = fault_code("a queue pair is granted and its next epoch was not claimed")
# intake
ENTRY_UNOWNED = fault_code("an entry is consumed from a queue pair that is not attached")
SLOT_HOLDS_PAGES = fault_code("a new request's slot holds pages")
LISTS_FULL = fault_code("a list of requests has no place for a new one")
# waiting_list
RANKED_IDLE = fault_code("a request is ranked that does not wait")
RANKED_UNKNOWN = fault_code("a request is ranked that was not accepted")
# forecast
COMPUTED_BEYOND = fault_code("more tokens are computed than the request has")
STACK_SHORT = fault_code("pages were evicted and the free stack holds fewer than are taken")
FORECAST_PAGELESS = fault_code("a forecast token has no page")
FORECAST_ROWS = fault_code("the fast path is forecast for a batch in which a request does not decode")
# fast_path
FAST_PATH_ROWS = fault_code("the fast path has a batch that is not all running requests")
FORECAST_STALE = fault_code("a forecast row is not one token ahead of its request")
FAST_PATH_CUT = fault_code("the fast path has a batch that is cut into groups")
# commit
COMMIT_IDLE = fault_code("a token is committed to a request that does not run")
COMPLETION_DROPPED = fault_code("the completion ring has no room for a step's token")
# slot_lists
RELEASED_IDLE = fault_code("a request is released that does not run")
RELEASED_HOLDS = fault_code("a released request holds pages")
# endings
ENDING_MISCOUNTED = fault_code("fewer or more requests end than were marked")
ENDED_IN_FLIGHT = fault_code("a request ends while it is in flight")
NOTIFIED_UNENDED = fault_code("an end is published of a request that has none")
# stall
CLAIMED_TWICE = fault_code("a completion ring has a negative number of free entries")
STALLED_IDLE = fault_code("a request in the running list does not run")
# preempt
NO_VICTIM = fault_code("pages are missing and no request is left to be preempted")
VICTIM_IDLE = fault_code("a request is preempted that does not run")
VICTIM_IN_FLIGHT = fault_code("a request is preempted while it is in flight")
# admit
STARTED_IDLE = fault_code("a request is admitted that does not wait")
ROWS_FULL = fault_code("a request is admitted and no row is left")
NO_ENTRY = fault_code("a request is admitted and its completion ring has no unclaimed entry")
# plan
BATCH_BEYOND = fault_code("a batch has more rows or tokens than the largest bucket")
PLANNED_COMPUTED = fault_code("a request is planned that has nothing to compute")
CHUNK_PAGELESS = fault_code("a planned token has no page")
BEST_EFFORT_INTERRUPTS = fault_code("a best-effort prompt has a part in a step that interrupts another one")
# suspension
FLIGHT_LOST = fault_code("a step that was cut ends, and a request of it is not in flight")
SUSPENDED_TWICE = fault_code("a step is suspended while another one is")
RESUMED_WRONGLY = fault_code("a step is resumed at a group that it does not have, or its first one")
# publish
DEFERRED_BEYOND = fault_code("more completions are deferred than a batch has rows")
POOL_BEYOND = fault_code("more pages are free and cached than there are")
# recorder
RECORD_BEYOND = fault_code("a record is longer than the recorder's ring")
COPIED_BEYOND = fault_code("a recorded prompt is longer than the context")
