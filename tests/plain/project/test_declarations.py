"""One declaration: how many files mention an option, a field of HTTP bodies and a sampling parameter."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from blinkpy.config import SchedulerOptions
from blinkpy.queues.request_parameters import PARAMETERS

PACKAGE = Path(__file__).parents[3] / "blinkpy"
# Independent references and explanations of the scheduler must know each limit, and the simulator draws it.
CHECKS = ("verify", "kv/invariants")
ADVICE = "dpu/http/fields/peer_fields.py"  # its errors name replacements of other servers' fields
# Models and devices need sizes of memory and steps, too; the policy has a separate language and checks. Devices, caches and
# models without drafts refuse drafts.
WIDELY_USED = {"max_num_seqs", "max_num_batched_tokens", "step_groups", "policy", "speculative"}
SETTLED = {"speculative_tokens", "speculative_requests"}  # limits and memory plans read a property, which has the default


def files_with(word: str, *without: str) -> list[str]:
    """The files of the package with a word, in order of their paths. without: folders to leave out."""
    pattern = re.compile(rf"\b{word}\b")
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return [name for name, path in sorted(paths.items()) if not name.startswith(without) and pattern.search(path.read_text())]


@pytest.mark.parametrize("name", sorted({item.name for item in dataclasses.fields(SchedulerOptions)} - WIDELY_USED))
def test_a_scheduler_option_reaches_its_use_through_four_files(name: str) -> None:
    """Its declaration, the scheduler's limits, and the code that heeds it."""
    found = files_with(name, *CHECKS)
    assert {"config/scheduler_options.py", *({"kv/limits.py"} if name not in SETTLED else ())} <= set(found)
    assert len(found) <= 4, found
    checked = files_with(name)
    assert not {file for file in checked if file.endswith(("timed_server.py", "check_child.py", "engine.py"))}, checked


@pytest.mark.parametrize("name", ["max_completion_tokens", "guided_regex", "include_stop_str_in_output", "return_token_strs"])
def test_a_field_of_http_bodies_is_declared_in_one_file(name: str) -> None:
    assert len(files_with(name, ADVICE)) == 1, files_with(name)


@pytest.mark.parametrize("name", ["min_p", "presence_penalty", "frequency_penalty"])
def test_a_sampling_parameter_has_its_row_its_field_and_its_samplers(name: str) -> None:
    """The row and the field are in one file; the samplers of GPU and CPU apply it."""
    assert name in {p.name for p in PARAMETERS}
    declared = ["queues/request_parameters.py"]
    assert files_with(name, ADVICE, "kernels/sampling", "models/cpu") == declared
    assert files_with(name) != declared, "the samplers apply it"


def test_pages_have_the_fields_of_policies_and_keys() -> None:
    tool = runpy.run_path(str(PACKAGE.parent / "tools" / "write_field_tables.py"))
    for path, made in tool["tables"]().items():
        page = path.read_text()
        assert tool["written"](page, made) == page, "fields changed: run `make docs`"
    with pytest.raises(ValueError, match=r"A\.y has no comment"):
        tool["commented"]("A", "class A:\n    x: int  # tokens\n    y: int\n")
    assert tool["commented"]("A", "class A:\n    x: int = 1  # tokens\n\nz: int\n").endswith("| `x` | tokens |\n")
