"""The service of tenants: virtual token counters, by which a policy can be fair between tenants.

A tenant has a counter for each class: its served tokens divided by its weight (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). An output token counts as OUTPUT_COST. A rank does not change
while a request waits, so a request is charged at acceptance, with its tenant's expected output. The request's service is the
counter before the charge (start-time fair queueing: Goyal, Vin, Cheng, IEEE/ACM ToN 1997). When the request ends, the charge is
corrected. A tenant that returns from idle is lifted to the least counter of waiting tenants, so idle tenants collect no credit.
The rule is R18 of docs/verification.md.
"""

from blinkpy.device.portable import barrier, block_max, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.request_parameters import WEIGHT_ONE
from blinkpy.queues.submission import WORD_BEST_EFFORT, WORD_MAX_TOKENS, WORD_PROMPT_LENGTH, WORD_TENANT, WORD_TENANT_WEIGHT

TOKEN_SERVICE = 1000
"""The increase of the counter per prompt token, for a tenant of weight 1."""

OUTPUT_COST = 2  # prompt tokens per generated token
EXPECTED_OUTPUT = 256  # tokens, for a new tenant
LEARNING_SHIFT = 2  # the expectation moves by 2**-2 of its error after each output
NONE = 1 << 62


@device
def service_cost(prompt, output, weight):
    """The increase of a tenant's counter for prompt and output tokens."""
    return (prompt + OUTPUT_COST * output) * (TOKEN_SERVICE * WEIGHT_ONE) // weight


@device
def charge_tenant(limits, state, slot, waiting, lane, lanes):
    """Charge the tenant of the entry in scratch.entry for its new request in `slot`.

    waiting: number of requests in `waiting`, including unranked ones.
    Lane 0 writes; ends without a barrier.
    """
    requests, tenants, entry = state.requests, state.tenants, state.scratch.entry
    key = entry[WORD_TENANT] << 1 | entry[WORD_BEST_EFFORT]
    row, known = find_tenant(limits, tenants, key, lane, lanes)
    floor = NONE
    for i in strided(lane, waiting, lanes):
        if requests.entry[state.waiting[i], WORD_BEST_EFFORT] == entry[WORD_BEST_EFFORT]:
            floor = min(floor, requests.service[state.waiting[i]])
    floor = -block_max(-floor, lane, lanes)
    if lane == 0:
        service = tenants.clock[0] if floor == NONE else floor
        expected = EXPECTED_OUTPUT
        if known:
            service, expected = max(service, tenants.service[row]), tenants.expected[row]
        charged = service_cost(entry[WORD_PROMPT_LENGTH], min(expected, entry[WORD_MAX_TOKENS]), entry[WORD_TENANT_WEIGHT])
        requests.service[slot], requests.charged[slot], requests.tenant_row[slot] = service, charged, row
        tenants.key[row], tenants.service[row], tenants.expected[row] = key, service + charged, expected


@device
def find_tenant(limits, tenants, key, lane, lanes):
    """(row, whether it has this key). Without such a row: the first row with the least counter, preferring unused rows."""
    own, least = -1, NONE
    for row in strided(lane, limits.slots, lanes):
        own = row if tenants.key[row] == key else own
        least = min(least, tenants.service[row])
    own = block_max(own, lane, lanes)
    if own >= 0:
        return own, True
    least = -block_max(-least, lane, lanes)
    first = limits.slots
    for row in strided(lane, limits.slots, lanes):
        if tenants.service[row] == least:
            first = min(first, row)
    return -block_max(-first, lane, lanes), False


@device
def settle_services(state, ended, lane, lanes):
    """Correct the charges of the ended requests scratch.slot[0:ended], before their states change. Ends with a barrier."""
    requests, tenants = state.requests, state.tenants
    if lane == 0:
        for i in range(ended):
            slot = state.scratch.slot[i]
            entry, row, served = requests.entry, requests.tenant_row[slot], 0
            if tenants.key[row] == entry[slot, WORD_TENANT] << 1 | entry[slot, WORD_BEST_EFFORT]:
                if requests.status[slot] == S.RUNNING or requests.preemptions[slot] > 0:
                    output = max(0, requests.length[slot] - requests.prompt_length[slot])
                    served = service_cost(requests.prompt_length[slot], output, entry[slot, WORD_TENANT_WEIGHT])
                    tenants.expected[row] += (output - tenants.expected[row]) >> LEARNING_SHIFT
                tenants.service[row] = max(0, tenants.service[row] + served - requests.charged[slot])
    barrier(lanes)
