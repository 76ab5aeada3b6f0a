"""Random HTTP requests against an independent model of the API; and the model against planted bugs.

Claim front-ends/http-model: Every accepted value reaches the submission. Whole answers and streams have the texts, finish
reasons, log probabilities and counts that follow from the request and the engine's tokens.

Tester [HTTP model](#the-http-model): a request from its body to submissions, and back to answers and streams |
225 fresh random requests
"""

import importlib
import os
import random
from pathlib import Path

import pytest
from support.front_end.http_bugs import HTTP_BUGS
from support.front_end.http_oracle import oracle_server
from support.seeded_bugs import Bug, patched_source, planted

NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
CASES = 5_000 if NIGHTLY else 150
HUNT = 3_000  # maximum cases for a bug; most bugs are found within 20, the rarest within 600
BUGS = 5  # drawn in each run
SEED = int(os.environ["BLINKPY_SEED"])


def found_by_oracle(bug: Bug | None, folder: Path, cases: int, seed: int) -> str:
    """The first difference from the model on servers with a bug; "" without a difference. cases: for each server."""
    with planted(bug or HTTP_BUGS[0]._replace(after=HTTP_BUGS[0].before)):
        make = importlib.import_module("blinkpy.dpu.worker").make_server
        for plain in (False, True):
            with oracle_server(folder, plain, make=make) as oracle:
                try:
                    oracle.run(seed, cases)
                except AssertionError as error:
                    return str(error)
    return ""


@pytest.mark.timeout(1800 if NIGHTLY else 300)
@pytest.mark.parametrize("plain", [False, True], ids=["with calls and reasoning", "plain"])
def test_random_requests_get_the_answers_of_the_model(plain: bool, tmp_path: Path, seed: int) -> None:
    with oracle_server(tmp_path, plain) as oracle:
        oracle.run(seed, CASES if not plain else CASES // 2)


@pytest.mark.parametrize("bug", HTTP_BUGS if NIGHTLY else random.Random(SEED).sample(HTTP_BUGS, BUGS), ids=lambda bug: bug.what)
def test_the_model_finds_a_planted_bug(bug: Bug, tmp_path: Path, seed: int) -> None:
    """A sample of the bugs in each run, and all nightly."""
    said = found_by_oracle(bug, tmp_path, HUNT, seed)
    assert said, f"no difference from the model, although {bug.what}"
    print(said)


def test_every_patch_fits() -> None:
    assert len({bug.what for bug in HTTP_BUGS}) == len(HTTP_BUGS) == len([patched_source(bug) for bug in HTTP_BUGS])
