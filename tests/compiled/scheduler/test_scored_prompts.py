"""Prompts with log probabilities: they return a token a step, and then continue like other prompts.

Supports claim outputs/scores.
"""

import pytest
from support.scheduler_cases import make_case, tokens

from blinkpy.kv import state as S
from blinkpy.queues import words as C
from blinkpy.queues.submission import SUBMIT_SCORE_PROMPT
from blinkpy.scheduler.policies import RequestFields

SCORED = {"flags": SUBMIT_SCORE_PROMPT, "logprobs": 0}


def fewest_generated(request: RequestFields) -> int:
    return request.generated


@pytest.mark.parametrize("lanes", [1, 3])
def test_scores_of_the_prompt_precede_the_output(lanes: int) -> None:
    """The generated tokens equal those of the same request without scores: ExpectedRequest computes both. With other requests, on
    the fast path."""
    case = make_case(lanes=lanes, max_model_len=64)
    scored, plain = case.submit(tokens(9), 5, min_tokens=3, stop_ids=(tokens(9)[3],), **SCORED), case.submit(tokens(9), 5, pair=1)
    case.finish()
    assert scored.got[:8] == tokens(9)[1:] and scored.ended == plain.ended == C.FINISH_LENGTH
    assert scored.got[8:] == plain.got
    assert (case.counter("prompt_tokens"), case.counter("generated_tokens")) == (18, 10)


def test_its_pages_are_cached_and_no_hits_are_taken() -> None:
    case = make_case(max_model_len=64)
    first, again = (case.submit(tokens(9), 2, **SCORED) for _ in range(2))
    case.finish()
    assert case.counter("prefix_hit_tokens") == 0, "each token must be computed"
    plain = case.submit(tokens(9), 2)
    case.finish()
    assert case.counter("prefix_hit_tokens") == 8
    assert first.got[8:] == again.got[8:] == plain.got


def test_a_preempted_scored_prompt_resumes() -> None:
    """Each token arrives once, though most are computed twice. The policy sees no negative number of generated tokens."""
    case = make_case(fewest_generated, pairs=1, slots=6, rows=3, pages=9, max_model_len=32)
    made = [case.submit(tokens(18, i), 6, **SCORED) for i in range(4)]
    while case.counter("preemptions") == 0:
        case.read(0)
        case.turn()
    assert case.state.requests.length[case.state.waiting[0]] < 18 and case.state.requests.rank.tolist() == [0] * 6
    case.finish()
    assert [len(request.got) for request in made] == [23] * 4


def test_a_step_that_deviates_from_the_scored_prompt_is_an_error() -> None:
    """In the first turn, and in a turn on the fast path; other requests continue."""
    for turns in (1, 4):
        case = make_case()
        bad, good = case.submit(tokens(9), 3, **SCORED), case.submit(tokens(4), 6, pair=1)
        case.turn(turns)
        rows = case.state.batch.row_slots[: case.state.batch.counts[S.ROWS]].tolist()
        case.state.batch.sampled[rows.index(0)] = (tokens(9)[turns] + 1) % 50
        bad.finish, bad.expected = C.FINISH_ERROR, bad.expected[: turns - 1]
        case.finish()
        assert (bad.ended, good.ended) == (C.FINISH_ERROR, C.FINISH_LENGTH)
