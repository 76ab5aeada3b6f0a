"""Cases of the sampler."""

import numpy as np
import torch
from support.models import kernel_reference
from support.models.kernel_cases.kernel_inputs import header, ints, repeats
from support.models.random_grammars import RandomGrammars

from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sampler import RequestView, SamplingCall, SamplingWorkspace, sample_tokens
from blinkpy.kv.state import DRAFT
from blinkpy.queues import submission as E
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY, TOP_LOGPROBS

PARAMETERS = {
    E.WORD_TEMPERATURE: (0.0, 0.3, 1.0, 1.7),
    E.WORD_TOP_P: (1.0, 1.0, 0.9, 0.5, 0.01),
    E.WORD_MIN_P: (0.0, 0.0, 0.05, 0.5),
    E.WORD_REPETITION_PENALTY: (1.0, 1.0, 1.3),
    E.WORD_PRESENCE_PENALTY: (0.0, 0.0, 0.7),
    E.WORD_FREQUENCY_PENALTY: (0.0, 0.0, -0.4),
}
PENALTIES = (E.WORD_REPETITION_PENALTY, E.WORD_PRESENCE_PENALTY, E.WORD_FREQUENCY_PENALTY)
UNTOUCHED = 1e6
AT_THE_EDGE = -1  # min_tokens: as many as the output has, or one more
FILTERS = (E.WORD_TEMPERATURE, E.WORD_TOP_P, E.WORD_MIN_P)


def draw_requests(
    rng: np.random.Generator, rows: int, bucket: int, vocabulary: int, history: int, fixed: dict[int, float]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of a RequestView, and row_slots, emits and context_lengths [B] of rows over some of them; int32.

    Every row has its own mixture of sampling parameters, except for the `fixed` words (word -> value; for min_tokens also
    AT_THE_EDGE). About one row in eight emits nothing.
    """
    slots = bucket + 2
    entry = E.neutral_entries(slots).view(np.int32).reshape(slots, E.SQ_ENTRY_WORDS)
    reals = entry.view(np.float32)
    for word, values in PARAMETERS.items():
        reals[:, word] = rng.choice(values, slots)
    entry[:, E.WORD_TOP_K] = rng.choice([0, -1, 1, 7, vocabulary // 2, 2 * vocabulary], slots)
    entry[:, E.WORD_LOGPROBS] = rng.choice([-1, 0, 5], slots)
    entry[:, E.WORD_MIN_TOKENS] = rng.choice([0, 0, history // 3, 2 * history], slots)
    for stop_ids in entry[:, E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS]:
        count = rng.integers(0, min(E.STOP_IDS, vocabulary // 2) + 1)
        stop_ids[:count] = rng.choice(vocabulary, count, replace=False)
    entry[:, E.WORD_FLAGS] = rng.choice([0, 0, 0, E.SUBMIT_SCORE_PROMPT], slots)
    for word, value in fixed.items():
        (reals if word in PARAMETERS else entry)[:, word] = value
    row_slots = np.full(bucket, -1, np.int32)
    row_slots[:rows] = rng.permutation(slots)[:rows]
    context = np.zeros(bucket, np.int32)
    context[:rows] = rng.integers(1, history, rows)
    # Every second row draws close to 1: the last token that passes the filters.
    seeds = rng.integers(-(2**63), 2**63, (slots, 300))
    for row in range(1, rows, 2):
        mine, position = seeds[row_slots[row]], int(context[row])
        mine[0] = max(mine.tolist(), key=lambda seed: kernel_reference.uniform(seed, position))
    entry.view(np.int64)[:, E.LONG_SEED] = seeds[:, 0]
    emits = (rng.random(bucket) < 0.875).astype(np.int32)
    emits[0] = 1
    tokens = np.full((slots, history), vocabulary + 5, np.int32)  # a history is meaningless beyond its length
    prompt_length = rng.integers(1, history // 2, slots).astype(np.int32)
    entry[:, E.WORD_OUTPUT_TOKENS] = rng.integers(0, prompt_length) * rng.integers(0, 2, slots)
    made = context[:rows] + 1 - prompt_length[row_slots[:rows]]  # with the next token
    entry[row_slots[:rows], E.WORD_MAX_TOKENS] = np.maximum(1, made) + rng.choice([0, 0, 0, 1, 2, history], rows)
    if fixed.get(E.WORD_MIN_TOKENS) == AT_THE_EDGE:
        generated = np.maximum(0, context[:rows] - prompt_length[row_slots[:rows]])
        entry[row_slots[:rows], E.WORD_MIN_TOKENS] = generated + rng.integers(0, 2, rows)
    for row in range(rows):
        slot, known = row_slots[row], context[row]
        known = max(known, prompt_length[slot]) if entry[slot, E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT else known
        few = vocabulary if rng.random() < 0.5 else min(vocabulary, 4)  # then banned sequences occur
        tokens[slot, :known] = rng.integers(0, few, known)
    return {"entry": entry, "tokens": tokens, "prompt_length": prompt_length}, row_slots, emits, context


def scores(arrays: dict[str, np.ndarray], slot: int, length: int) -> bool:
    """Whether a request's next token, after `length` tokens, is in its scored prompt."""
    asked = bool(arrays["entry"][slot, E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT)
    return asked and length < int(arrays["prompt_length"][slot])


def sampling_case(
    rng: np.random.Generator, device: str, *, rows: int, bucket: int, vocabulary: int, spread: float, ties: bool = False,
    workspace: SamplingWorkspace, history: int = 40, mismatches: int = 0, slack: float = 1e-5,
    fixed: dict[int, float] | None = None, variant: str = "",
) -> None:  # fmt: skip
    """Tokens and log probabilities against the CPU sampler. spread: spread of the logits; ties: many logits are equal. slack:
    tolerance of numbers and bounds, because a float32 sum may be on their other side."""
    logits = rng.standard_normal((bucket, vocabulary)).astype(np.float32) * spread
    if ties:
        logits = np.round(logits)
    logits[:, rng.integers(vocabulary)] = -np.inf
    arrays, row_slots, emits, contexts = draw_requests(rng, rows, bucket, vocabulary, history, fixed or {})
    counts = header(rows, rows, rows, device)
    given = torch.from_numpy(logits.copy()).to(device)
    requests = RequestView(*(ints(arrays[name], device) for name in RequestView._fields))
    automata = RandomGrammars(rng, len(arrays["entry"]), vocabulary)
    automata.constrain(arrays["entry"])
    for slot, length in zip(row_slots[:rows].tolist(), contexts[:rows].tolist(), strict=True):
        entry, generated = arrays["entry"][slot], length + 1 - int(arrays["prompt_length"][slot])
        stop_ids = entry[E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS]
        legal = automata.legal(slot, stop_ids, automata.most_distance(slot, entry, generated))
        legal[stop_ids[stop_ids >= 0]] = False
        if legal.sum() < 2:  # no byte is a token here, so no end may be reachable
            entry[E.WORD_MAX_TOKENS] = 1 << 20
    drafted = dict[int, int]()  # slots with drafts, and the number of tokens before theirs
    for place in np.flatnonzero((emits[:rows] != 0) & (rng.random(rows) < 0.4)).tolist() if rng.random() < 0.7 else ():
        if not scores(arrays, int(row_slots[place]), int(contexts[place])):
            emits[place], drafted[int(row_slots[place])] = DRAFT, int(contexts[place])
    requests, grammars = requests._replace(entry=ints(arrays["entry"], device)), automata.view(rng, device, drafted or None)
    allowed = logits.copy()
    for row in np.flatnonzero(emits[:rows]):
        slot = int(row_slots[row])
        if scores(arrays, slot, int(contexts[row])):
            continue
        entry, generated = arrays["entry"][slot], int(contexts[row]) + 1 - int(arrays["prompt_length"][slot])
        most = automata.most_distance(slot, entry, generated)
        allowed[row, ~automata.legal(slot, entry[E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS], most)] = -np.inf
    slots, emitted, lengths = (ints(array, device) for array in (row_slots, emits, contexts))
    other = torch.zeros_like(slots)  # words that sampling does not read
    batch = BatchView(counts, slots, other, lengths, emitted, other, other)
    records = torch.full((bucket, LOGPROB_ENTRIES), -7, dtype=torch.int64, device=device)
    workspace.adjusted.fill_(UNTOUCHED)
    runs = []
    for _ in range(repeats(device)):
        sampled = torch.full((bucket,), -7, dtype=torch.int32, device=device)
        call = SamplingCall(given, requests, grammars, batch, sampled, records, workspace)
        sample_tokens(call, variant)
        runs.append(sampled)
    assert torch.equal(runs[0], runs[-1]), "two runs differ"
    logits = allowed
    assert torch.equal(given.cpu(), torch.from_numpy(logits)), "legal logits were changed, or illegal logits were kept"
    write_logprobs(call)
    entries = records.cpu().numpy().view(LOGPROB_ENTRY)

    emitting = np.flatnonzero(emits[:rows])
    silent = np.setdiff1d(np.arange(bucket), emitting)
    found = sampled.cpu().numpy()
    assert (found[silent] == -7).all(), "rows that emit nothing got a token"
    wrong = []
    for row in emitting:
        slot, length = int(row_slots[row]), int(contexts[row])
        words, tokens, prompt_length = (arrays[name][slot] for name in RequestView._fields)
        reals = words.view(np.float32)
        begin = int(prompt_length - words[E.WORD_OUTPUT_TOKENS])
        adjusted = kernel_reference.penalize(
            automata.under_rules(slot, logits[row], tokens[begin:length].tolist()),
            tokens[:length],
            begin,
            *(float(reals[word]) for word in PENALTIES),
        )
        masked = max(0, length - int(prompt_length)) < words[E.WORD_MIN_TOKENS]
        if masked:
            adjusted[[stop for stop in words[E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS] if stop >= 0]] = -np.inf
        # Sampled tokens reveal few wrong logits. Unchanged tensors are not copied.
        changed = masked or automata.ruled[slot] >= 0 or [float(reals[word]) for word in PENALTIES] != [1.0, 0.0, 0.0]
        expected_logits = adjusted if changed else np.full_like(adjusted, UNTOUCHED)
        np.testing.assert_allclose(workspace.adjusted[row].cpu().numpy(), expected_logits, rtol=1e-4, atol=1e-4)
        temperature, top_p, min_p = (float(reals[word]) for word in FILTERS)
        number = kernel_reference.uniform(int(words.view(np.int64)[E.LONG_SEED]), length)
        expected = kernel_reference.sample_span(adjusted, temperature, int(words[E.WORD_TOP_K]), top_p, min_p, number, slack)
        if scores(arrays, slot, length):
            expected = np.array([tokens[length]])
        if found[row] not in expected:
            wrong.append((row, found[row], expected, temperature, int(words[E.WORD_TOP_K]), top_p, min_p, number))
        if words[E.WORD_LOGPROBS] < 0:
            assert (records[row] == -7).all(), "log probabilities without a request for them"
            continue
        every, top = kernel_reference.top_logprobs(logits[row], TOP_LOGPROBS)
        top = top[np.isfinite(every[top])]
        assert entries["token"][row].tolist() == [found[row], *top, *[-1] * (TOP_LOGPROBS - len(top))]
        np.testing.assert_allclose(entries["logprob"][row, : len(top) + 1], every[[found[row], *top]], atol=1e-4)
        assert (entries["logprob"][row, len(top) + 1 :] == -np.inf).all()
    assert len(wrong) <= mismatches, f"(row, found, expected, temperature, top_k, top_p, min_p, uniform): {wrong}"
    assert (records[silent.tolist()] == -7).all(), "log probabilities of rows that emit nothing"
