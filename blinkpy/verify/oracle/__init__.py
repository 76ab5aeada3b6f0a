"""The decision oracle: the scheduler's rules as a second, independent implementation over plain Python objects.

A turn applies the rules in this order. TPOT is the time per output token; a request lacks n tokens if n of its
tokens are not computed yet.

R1. A front end loses its queue pair and all its requests in four cases: its heartbeat does not change for
longer than a lease; it announces more entries than the ring has; its completion head moves back or past the
tail; a claim of the pair is granted. A claim of the next epoch is granted immediately if it is the first. A
later claim is granted when the last grant is an eighth of a lease old, or 0.1 s if that is less. Words of
another epoch are ignored.

R2. While the command is COMMAND_RUN, entries are consumed, except those of queue pairs that are lost in this
turn. One entry of each pair is consumed in rotation, until the turn's bound of entries or of prompt tokens is
reached. An entry of another epoch, or for a slot in use, is skipped; an entry that can't be served is
refused. Words of automata and token rules count as prompt tokens. A pair has a share of slots for grammars
and token rules. An entry whose automaton or rules are stored in this epoch uses that slot, without reading
them again. Otherwise it takes an empty slot, or the slot assigned longest ago that no waiting or running
request uses. Without such a slot, or with invalid automata or rules, it is refused. A request with a scored
prompt begins with the prompt's first token.

R3. A request is ranked when it begins to wait. Lower ranks go first, equal ranks in order of arrival. If the
policy has no result in the numbers of its language ([policies.md](policies.md)), the rank is 2^63 - 2, and
the fault is counted.

R4. The pages that a step filled are indexed after the page before them, row by row. If the index already has
an equal page there, that page replaces it. Of equal pages in one step, the first is indexed; the others, and
the pages after them, wait for the next step. A request whose last indexed page was evicted offers no further
pages.

R5. Tokens sampled by a step get their pages while the step runs, except last tokens. Either all tokens get
pages or, if there are too few pages, none.

R6. In the order of rows, a token is appended and published. While a prompt is scored, the token must be the
prompt's next token; otherwise the request ends with an error. A scored token does not count as generated, and
nothing else ends the request. In other cases, a token ends its request in three cases: it is a stop id after
min_tokens; the request reaches max_tokens or the model's context; its grammar allows no further token,
whatever min_tokens is. It ends the request with an error if it is outside the vocabulary or illegal in the
grammar. A stop id is legal if the output may end. Let d be the minimum number of bytes to an output that may end. While d is at
most the number of remaining tokens, a token is legal only if this still holds after it. There
are three exceptions: a request has token rules; its grammar has no distances; or the output may end, but no stop
id can end it.

R7. Then requests end whose cancel was visible when the turn began, and requests of lost queue pairs: running
requests first, then waiting ones. Last completions are published in order, while the ring has space.

R8. COMMAND_STOP ends the loop at this point; COMMAND_DRAIN does so when no request is left.

R9. A running request stalls if the earlier requests of its pair in `running` take all free entries of the
completion ring. A request that does not stall has reserved its entry for this turn, even if it is preempted.
R12 and R16 count the remaining entries.

R10. A decoding request gets the page that it lacks. While there are too few pages, a running request is
preempted: the latest of the stalled requests or, if no request stalls, the request with the greatest (rank,
arrival).

R11. The budget. While best-effort prompts yield (R16, R23), it is `sensitive_step_tokens` plus one for each
row of one token, at most the largest batch. Otherwise, while a request decodes and prompts lack at most
burst_tokens, it is mixed_tokens. If they lack more, and more than mixed_tokens each on average, it is
burst_step_tokens. In all other cases it is the largest batch.

R12. If no request was preempted, waiting requests are admitted in order while budget, rows and pages last;
the first request that does not fit ends the admission. A request fits if its pages without hits are
available, plus one for each running request, at most an eighth of the pool. Stalled requests are preempted
for a request that does not fit. A request without a free entry in its completion ring is skipped. The tokens
that best-effort prompts lack use no more of the budget than R19 allows. While they lack that many tokens, or best
effort holds all its pages (R20), all waiting best effort is skipped. While best-effort prompts yield, only
latency-sensitive requests are admitted, in order; best-effort requests are overtaken as in R16. For such a request, the used
budget is the decodes plus the missing tokens of latency-sensitive prompts with a lower (rank, arrival), so it overtakes prompts
that have begun.

R13. Hits are indexed pages of the request's first tokens, each following the previous page and with the same
salt. At least one token is computed. The number of hits is published when the request first begins to run.

R14. A request releases its last page first. Indexed pages without another holder become cached. Cached pages
are evicted in the order of their release, and no more than needed.

R15. The batch has a row for each request that lacks one token, in the order of `running`; then chunks of the
others in that order, while the budget lasts. If best-effort prompts have no part in it, chunks of
latency-sensitive requests are ordered by (rank, arrival). In such a step, special rules hold for a chunk that
does not end its prompt and follows another chunk. It fills the step to at most half of
`sensitive_step_tokens`, not counting rows of one token, and no chunk follows it. The bucket is the smallest
that fits the batch.

R16. Best-effort prompts yield in a turn if a best-effort request runs or waits, and one of two conditions
holds. Either a latency-sensitive request that is not stalled runs and lacks more than one token; or a row is
free and a latency-sensitive request can enter. They do not yield after `yield_steps` consecutive such turns.
The request that can enter is the first waiting latency-sensitive request with a free entry in its completion
ring. If a best-effort request is ahead of it, that request is overtaken. No request can enter after
`yield_steps` such overtakings since a best-effort request was admitted, or was skipped in R12 because of its
class. While best-effort prompts yield, no best-effort request is admitted. The tokens that running ones lack,
if more than one, use no budget in R12. They have no part in the batch if a latency-sensitive request has a
chunk of more than one token in it.

R17. With a TPOT target for its class, a request has a pace of 31/32 of the target; without a target the pace
is 0. After R9, the next step is delayed, and R10 to R16 wait for a later turn, if all of these conditions hold:
the command is COMMAND_RUN; no request waits; some running request does not stall, and each such request lacks
one token and has generated one; every such request would be in time. It is in time if a step that began now
ended less than a pace after the last step, and less than n paces after its first generated token. Here n is
its number of generated tokens. The expected duration of a step is taken from the last step in which all rows
decoded: the time between the turns that plan and commit it. The estimate falls by at most an eighth per step
(rounded down), and is at most the longer pace, that of best effort. Before the first such step, no step is
held.

R18. A tenant has a count for each class. An accepted request's service is the greater of this count and a
floor. The floor is the lowest service among waiting requests of its class, including unranked ones; if none
waits, it is the greatest service of any request that ever ran. The count becomes this service plus the
charge. The charge is the prompt plus twice the expected output, at most max_tokens, in thousandths of a
token, divided by the weight in hundredths, rounded down. The expected output is 256 for a new tenant; after
each output it moves by a quarter of the difference (rounded down). When a request ends, its real service
replaces its charge, but the count is never below 0. A request that never ran has no service and does not
change the expectation. There are as many counts as slots. A new tenant takes an unused count or, if all are
used, the first of the lowest counts; a request that ends then no longer finds its tenant's count.

R19. The chunks of best-effort requests that lack more than one token have at most `best_effort_step_tokens`
tokens in a step, minus one for each row of one token. Within this limit and the budget, R15 applies.

R20. Running best-effort requests together hold at most `best_effort_pages` pages, unless this is the whole
pool or there is only one such request. A page with several holders counts for each. In R5, no request gets a
page if best effort would exceed the limit. In R10, while best effort would exceed it, a best-effort request
is preempted, before any preemption for lack of pages, and chosen as in R10. In R12, a waiting best-effort
request also needs, in addition to the pages of its tokens, one for each running best-effort request, at most
an eighth of the limit. While that is too much, stalled best-effort requests are preempted, the latest first.

R21. A step is cut into groups of layers under these conditions: no step is suspended; it has a chunk of a
best-effort prompt; it has more than `cut_tokens` tokens, and more than one group. The number of groups is
`step_groups` for the largest bucket, and proportional to the bucket's tokens for smaller buckets, rounded up.
The step's requests are in flight until its last group has run. A turn follows each group. After a group that
is not the last, the step has no result yet, and the turn applies R1, R2, R3 and R22. If the step continues,
the turn ends there.

R22. After R5, such a turn suspends the step, and a turn after an interrupting step plans another step, if all
of these conditions hold: the command is not COMMAND_STOP; fewer than `suspend_steps` steps have interrupted
the step; a latency-sensitive prompt can continue. It can in two cases. A latency-sensitive request that is
not in flight runs, lacks more than one token and does not stall. Or a request can enter (R16, with the
entries of completion rings as R12 left them), and a row is free. Its pages must then be available without
hits, plus one for each running request, at most an eighth of the pool.

R23. From the turn that suspends a step until the step is resumed, R3 to R7 and R9 to R15 apply to requests
that are not in flight. Requests in flight keep their rows, pages and slots: they do not end, are not
preempted, and lack nothing; each that will emit keeps an entry of its completion ring. In interrupting steps,
best-effort prompts yield, and the limit of R16 on consecutive turns does not apply. R8, R16 and R17 wait.
While a cut step has not run its last group, no queue pair is lost and no claim is granted (R1); entries
announced beyond a ring are skipped.

R24. Otherwise, a suspended step is resumed with its next group after R9; and also after R15, if the planned
step has no rows.

R25. With `speculative`, requests may have drafts, unless a step is suspended, a request that does not stall lacks
several tokens, or more than `speculative_requests` requests do not stall. Drafts follow an earlier place in the
request's own tokens at which its last `speculative_match` tokens occurred. The place may reach into the drafts. With
a draft layer, the committed step returned the drafts for the request's own row; they end before the first number
outside of the vocabulary. A request has no drafts in three cases: its prompt is scored; it rests; its completion ring
has no more free entries than a step has rows. Drafts and one token do not exceed max_tokens and the model's context.
With a grammar, drafts end before the first draft that no output allows; the rest are counted as refused. A request
begins with `speculative_tokens` drafts per step. The number doubles, up to this maximum, after a step in which all
were correct. After other steps it becomes one more than the number of correct drafts. If the first draft was wrong,
it is halved, and without a draft layer the request rests for 16 tokens. The rows that R15 leaves go to the requests
in the order of `running`, one for each draft. So do pages, while one remains for each running request, at most an
eighth of the pool. From the first request for which they do not suffice, requests keep only the drafts for which they
have pages. Best effort takes no pages for drafts if R20 limits it.

R26. A draft has a row of one token after its request's row; requests with drafts have the last rows. A draft's row samples a
token, too. A draft is correct if it equals the token sampled before it and all drafts before it are correct. R6 applies to the
token of the request's row, and then to the tokens of correct drafts, until the request ends. These drafts count as computed (R4)
when their tokens are appended; wrong drafts have no effect. R17 measures no step with drafts.

R27. A model with recurrent layers has `state_snapshots` snapshots of states. Then hits (R13) end at the last page with a
snapshot that leaves at least two tokens to compute. The end of the other found pages is the request's branch. When the
request begins to run, it uses the snapshot of its last hit. Its first step starts from a copy of it. Until that step has
ended, or the request stops running, the snapshot is pinned. A snapshot is invalid once its page is evicted.

R28. With snapshots, a chunk of a request that uses the prefix index ends at the latest at the first of three positions after its
computed tokens: the last page border that leaves two tokens to compute; its branch; a multiple of `snapshot_tokens`. The first
two count from a sixteenth of `snapshot_tokens` on. A request whose last indexed page was evicted has no such positions. R15
treats the tokens up to there as all that the prompt lacks. If such a chunk is in the batch and does not end its prompt, the step
copies the state into a snapshot that is not pinned. That is the first invalid or unused snapshot, or else the least recently
used, by turn and then by number. It is pinned until the step has ended. Then, before R6, it belongs to the request's last
indexed page, if that page ends there and is not evicted. If the page already has a snapshot, that snapshot counts as used
instead.
"""
