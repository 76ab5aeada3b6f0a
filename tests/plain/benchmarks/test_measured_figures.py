"""What the pages show is what the result files give, and each result file is explained."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.harness import RESULTS, ROOT, UsageError, revision
from benchmarks.report import pages
from benchmarks.report.figure_files import shows
from benchmarks.report.gpu_tests import gpu_tests, joined, read_report
from benchmarks.report.grid_plot import draw
from benchmarks.report.grid_summary import FIGURES, MEDIANS, mean_ratio, repeated, series
from benchmarks.report.named_figures import NAMED
from benchmarks.report.pages import FIGURE, PAGES, PART, TEMPLATES, grid_page, part, rewritten
from benchmarks.report.part_tables import Results, maker
from benchmarks.report.serving_tables import behind, claim, energy_rows, fewer_bits, schemas, serving, slowdown
from benchmarks.serving.systems import SYSTEMS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text, Results(RESULTS)) == text, "run python -m benchmarks.report.pages"
    assert len(FIGURE.findall(text)) == text.count("<!-- figure:")
    assert len(PART.findall(text)) == len(re.findall("^<!-- measured:", text, re.MULTILINE))


def test_the_readme_has_no_figure_of_its_own() -> None:
    """No time, share, power or ratio stands outside of what is made from the results."""
    rest = FIGURE.sub("", PART.sub("", (ROOT / "README.md").read_text()))
    assert re.findall(r"\d(?:[\d.,]*\d)? ?(?:(?:ms|us|x|W|MHz|GB|J|tokens/s|requests/s)\b|%).*", rest) == []


def test_each_result_is_explained() -> None:
    results = Results(RESULTS)
    stems = {path.stem for path in RESULTS.iterdir() if path.suffix in (".png", ".md") and path.name != "README.md"}
    assert stems <= {*results.names, "claim"}, "a plot or a summary without its result"
    assert all(f"`{name}.json`" in (RESULTS / "README.md").read_text() for name in results.names)
    for name in results.names:
        origin = results.read(name).get("environment", results.read(name))
        assert origin["date"] and len(origin["commit"]["hash"]) == 40, name
    for name in filter(lambda name: name.startswith("paper-"), results.names):
        assert (RESULTS / f"{name}.md").read_text() == grid_page(results.read(name)["results"])
    for path, (sources, _) in pages.plots(results).items():
        assert shows(path, sources), f"{path.name} shows another result: run python -m benchmarks.report.pages"
    assert not any(name in path.read_text() for path in RESULTS.glob("*.json") for name in ('"samples": [', '"histogram"'))


@pytest.mark.parametrize(
    ("name", "benchmark", "command"),
    [
        ("cpu_engine", "cpu_engine", "`python -m benchmarks.parts.cpu_engine`"),
        ("paper-m", "paper", "`python -m benchmarks.serving.grid`"),
        ("classes-m", "serving.classes", "`python -m benchmarks.serving.classes`"),
        ("fleet_kills", "tools.fleet_kills", "`make fleet-kills`"),
        ("headroom", "headroom", "a benchmark of that commit"),
        ("decode", None, "a benchmark of that commit"),
    ],
)
def test_a_result_names_the_command_that_made_it(name: str, benchmark: str | None, command: str) -> None:
    assert maker(name, {} if benchmark is None else {"benchmark": benchmark}) == command


def test_a_page_whose_figures_are_old_is_noticed(tmp_path: Path) -> None:
    page = "before\n<!-- measured: files -->\nold\n<!-- end of measured -->\nafter\n"
    assert rewritten(page, Results(tmp_path)) == page.replace("old\n", part("files", Results(tmp_path)))
    with pytest.raises(UsageError, match="unknown part 'fils'"):
        rewritten(page.replace("files", "fils"), Results(tmp_path))


def test_prose_cites_figures_from_files(tmp_path: Path) -> None:
    """A figure in a sentence follows its file, and nothing else changes."""
    step = {"step_us": {"p50": 3807.0}, "scheduler_us": {"p50": 4.4}, "gap_us": {"p50": 8.1}, "share_of_floor": 0.891}
    slow = step | {"scheduler_us": {"p50": 5.3}, "gap_us": {"p50": 12.8}}
    (tmp_path / "decode-llama-3-8b.json").write_text(json.dumps({"rows": {"1": step, "256": slow}}))
    (tmp_path / "paper-qwen3-30b-a3b.json").write_text(json.dumps(document(CELLS)))
    names = ("gap-us", "decode-ms-llama", "bandwidth-share-llama", "interference-tpot-vllm-qwen")
    text = " and ".join(f"x <!-- figure: {name}{ending}-->0<!-- / --> us" for name, ending in zip(names, " \n  ", strict=True))
    found = rewritten(text, Results(tmp_path))
    assert re.findall(r"-->([^<]*)<!-- /", found) == ["8 to 13", "3.81", "89 %", "3.33"]
    assert re.sub(r"-->[^<]*<!-- /", "-->0<!-- /", found) == text
    with pytest.raises(UsageError, match="unknown figure 'gap'"):
        rewritten("<!-- figure: gap --><!-- / -->", Results(tmp_path))


@pytest.mark.parametrize("name", NAMED)
def test_each_named_figure_has_a_value(name: str) -> None:
    assert re.fullmatch(r"[\d.,]+( to [\d.]+)?( %)?", NAMED[name](Results(RESULTS)))


def test_seeded_bugs_are_counted() -> None:
    from support.seeded_bugs import FRONT_BUGS, SCHEDULER_BUGS

    assert NAMED["seeded-bugs"](Results(RESULTS)) == str(len(SCHEDULER_BUGS) + len(FRONT_BUGS))


def cell(
    system: str, mode: str, rate: float, tpot: float, streams: int = 0, front_end: str = "own", **more: Any
) -> dict[str, Any]:
    level = {"p50": {"value": tpot}, "p99": {"value": 3 * tpot, "low": 2 * tpot, "high": 4 * tpot}}
    return {
        "cell": {"system": system, "mode": mode, "rate": rate, "streams": streams, "front_end": front_end, "repeat": 0},
        "load": {"per_core": 8 * (mode == "interfered"), "kinds": ["compress"]},
        "server": {"version": "1.2", "start_to_healthy_s": 7.0, "idle_w": 120.0, "idle_before_w": 70.0},
        "ttft_ms": level,
        "tpot_ms": level,
        "output_tokens_per_s": 900.0,
        "goodput_per_s": 15.5,
        "energy": {"joules_per_token": 0.05},
        "errors": {},
        "client": {"lag_ms": {"p50": 0.1, "p99": 0.1}},
        "date": "2026-01-02T03:04:05+00:00",
        **more,
    }


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    cores = {"server": [0, 1, 2], "client": [3], "front_end": [2]}
    results = {"model": "m", "gpu": {"gpu": "G", "driver": "5"}, "cores": cores, "errors": {}, "smoke": False, "cells": cells}
    return {"machine": {"cpu": "C"}, "commit": {"hash": "0123456789" * 4}, "results": {**results, "complete": True}}


def shown(name: str, context: dict[str, Any]) -> str:
    """A part of a page, made of these results."""
    return TEMPLATES.get_template(f"{name}.md.j2").render(context)


LOADS = (("isolated", 1, 10), ("isolated", 2, 20), ("interfered", 1, 20), ("interfered", 2, 160))
CELLS = [
    cell("blinkpy", "isolated", 16, 8.0),
    cell("blinkpy", "isolated", 16, 8.4, output_tokens_per_s=909.0),  # measured again
    cell("blinkpy", "interfered", 16, 10.0),
    cell("blinkpy", "isolated", 0, 4.0, streams=64),
    cell("blinkpy", "isolated", 0, 9.0, streams=1),
    cell("vllm", "isolated", 16, 12.0, output_tokens_per_s=1000.0),
    cell("vllm", "interfered", 16, 40.0, errors={"unfinished": 3}),
    cell("vllm", "isolated", 0, 5.0, streams=64),
    cell("vllm", "isolated", 0, 4.5, streams=1, energy={"missing": "x"}),
    cell("vllm", "interfered", 16, 90.0, front_end="shared"),
]


def test_serving_tables() -> None:
    text = shown("serving", serving({"Em": document(CELLS), "En": {}}))
    assert "blinkpy 1.2, vllm 1.2, one after another on one G (driver 5) and C: the same 3 cores" in " ".join(text.split())
    assert "| 64 | vllm | 5 (1.25x) | 5 (1.25x) | 900 (1.00x) |" in text
    assert "| 1 | vllm | 4.5 (0.50x) | 4.5 (0.50x) | 900 (1.00x) |" in text
    assert "| 8 | own | vllm | 120 | 120 | 900 | 15.5 | 3 |" in text
    assert "| 8 | contended | vllm | 270 | 270 | 900 | 15.5 | 0 |" in text
    assert "| vllm | 3.33 | 3.33 | 0.90 | 1.00 |" in text
    assert "| vllm / blinkpy, interfered | 4.00 | 4.00 | 1.00 | 1.00 |" in text
    assert "differ by at most: median TTFT 5.0 %, median TPOT 5.0 %, throughput 1.0 %" in text
    assert "idle server: blinkpy 120 W (70 W before its start), vllm 120 W" in text
    assert "En under load, next to another server: not measured yet." in text


def test_loads_with_a_schema_stand_beside_the_same_without_and_nowhere_else() -> None:
    pairs = [
        cell("vllm", mode, 0, tpot, streams=64, neighbours=count)
        for mode, tpot, count in (("isolated", 5.0, 0), ("interfered", 6.0, 9))
    ]
    bound = copy.deepcopy(pairs[1]) | {"tpot_ms": {"p50": {"value": 12.0}, "p99": {"value": 27.0}}}
    bound["cell"]["schema"] = True
    text = shown("schemas", schemas({"Em": document([*pairs, bound]), "En": {}}))
    assert re.findall(r"^\| \d.*", text, re.MULTILINE) == ["| 64 | vllm | 9 | 6 | 12 | 2.00 | 18 | 27 | 1.50 |"]
    assert serving({"Em": document([*CELLS, bound])}) == serving({"Em": document(CELLS)})


def test_loads_with_fewer_bits() -> None:
    """Each load of each file, streams behind rates, with what its system was started with beside its own kind's command."""
    cells = [
        cell("blinkpy-fp8", "interfered", 16, 3.0),
        cell("blinkpy-fp8", "isolated", 16, 2.0),
        cell("vllm", "isolated", 0, 7.0, 64),
    ]
    for one in cells:
        kind = one["cell"]["system"].removesuffix("-fp8")
        one["server"] = {
            "version": "1.2",
            "command": " ".join([SYSTEMS[kind].command, "--quantization fp8" * (kind == "blinkpy")]),
        }
    context = fewer_bits([{"Em": document(cells[::-1]), "En": {}}, {"Em": document(cells[:1])}])
    text = " ".join(shown("fewer_bits", context).split())
    assert "2 requests/s" not in text and "Options: `blinkpy-fp8`: `--quantization fp8`." in text and "`vllm`" not in text
    assert [row[:2] for row in context["models"][0]["rows"]] == [
        ["16 requests/s", "blinkpy-fp8"], ["16 requests/s, 8 neighbours a core", "blinkpy-fp8"], ["64 streams", "vllm"],
    ]  # fmt: skip
    assert "| 16 requests/s | blinkpy-fp8 | 2 | 6 | 2 | 6 | 900 | 0.05 |" in text
    assert len(context["models"]) == 2 and "Not measured" not in text and "Not measured" in shown("fewer_bits", fewer_bits([{}]))


def test_grid_summary() -> None:
    lagging = {"lag_ms": {"p50": 0.1, "p99": 99.0}}
    cells = [cell("a", mode, rate, tpot) for mode, rate, tpot in LOADS]
    cells += [cell("b", "isolated", 1, 40), cell("b", "isolated", 2, 7, client=lagging), cell("b", "isolated", 1, 50)]
    cells += [cell("a", "isolated", 1, 10, front_end="shared"), cell("a", "interfered", 1, 70, front_end="shared")]
    found = document([*cells, cell("a", "isolated", 0, 5, streams=64)])["results"]
    quiet, noisy = (series(found, "a", mode, FIGURES["P99 TTFT"][1]) for mode in ("isolated", "interfered"))
    assert mean_ratio(noisy, quiet) == pytest.approx(4)  # of 2 and 8
    assert series(found, "b", "isolated", MEDIANS["median TTFT"]) == {1: pytest.approx((40 * 50) ** 0.5)}  # not the invalid cell
    text = grid_page(found)
    assert "| a | own | isolated | 64 streams | 5 / 15 |" in text and text.count(" INVALID |") == 1
    assert {key: values["median TTFT"] for key, values in repeated(found).items()} == {("b", "isolated", 1): pytest.approx(1.25)}
    assert slowdown(found, "a", "P99 TTFT") == pytest.approx(4) and slowdown(found, "b", "P99 TTFT") is None
    assert slowdown(found, "a", "P99 TPOT", "shared") == pytest.approx(7)  # front ends among the neighbours


def test_claim() -> None:
    text = shown("claim", claim({"En": {}, "Em": document(CELLS), "Eq": document(CELLS)}))
    assert "without → with 8 CPU-hungry processes on each" in " ".join(text.split())
    for title in ("Em", "Eq"):
        assert f"| {title} | vllm | 36 → 120 | 36 → 120 | 1,000 → 900 | 0 → 3 |\n" in text
    elsewhere = document(CELLS)
    elsewhere["results"]["gpu"] = {"gpu": "H"}
    with pytest.raises(ValueError, match="not measured alike"):
        claim({"Em": document(CELLS), "En": elsewhere})
    assert shown("claim", claim({"En": {}, "Em": document([one for one in CELLS if one["cell"]["mode"] == "isolated"])})) == ""


def test_what_is_worse_is_said() -> None:
    found = behind(document(CELLS)["results"])
    assert "throughput at 16 requests/s, isolated (1.11x)" in found
    assert "median TTFT at 1 stream (2.00x); median TPOT at 1 stream (2.00x)" in found
    assert found.count("(") == 3
    better = [one for one in copy.deepcopy(CELLS) if one["cell"]["streams"] != 1 and one["output_tokens_per_s"] != 1000.0]
    assert "nothing that was measured" in behind(document(better)["results"])


def test_what_is_missing_is_named() -> None:
    """A second model with the fourth system, and gaps: a placement, a mode, a rate, a closed loop, one that doesn't count."""
    cells = [cell("blinkpy", mode, rate, 8.0) for mode in ("isolated", "interfered") for rate in (2, 8, 16, 32)]
    cells += [cell("blinkpy-host", "isolated", rate, 9.0) for rate in (2, 8, 16)]
    cells += [cell("blinkpy-8192", "isolated", 16, 7.0), cell("blinkpy-8192", "isolated", 0, 5.0, streams=64)]
    cells += [cell("vllm", "isolated", rate, 8.0) for rate in (2, 8, 32)]
    cells += [cell("vllm", "isolated", 16, 8.0, client={"lag_ms": {"p50": 0.1, "p99": 9.0}})]
    cells += [cell("vllm", "isolated", 0, 6.0, streams=64), cell("blinkpy", "isolated", 16, 8.0, front_end="shared")]
    text = shown("serving", serving({"Em": document(CELLS), "En": document(cells)}))
    em, en = (" ".join(part.split()) for part in text.split("### ")[1:])
    assert "In 1 of 19 loads the client fell behind; they are left out: vllm 16 requests/s, isolated." in en
    missing = en[en.index("Not measured: ") :].partition(". ")[0].removeprefix("Not measured: ").split("; ")
    assert missing == [
        "blinkpy at 16 requests/s, interfered, front end on contended cores",
        "blinkpy with 64 streams",
        "blinkpy-host at 32 requests/s, isolated",
        "blinkpy-host at 2, 8, 16 and 32 requests/s, interfered",
        "blinkpy-host at 16 requests/s, isolated and interfered, front end on contended cores",
        "blinkpy-host with 64 streams",
        "vllm at 2, 8, 16 and 32 requests/s, interfered",
        "vllm at 16 requests/s, isolated and interfered, front end on contended cores",
    ]
    assert "| 0 | own | vllm | the client fell behind | | | | |" in en
    assert "| 8 | own | blinkpy |" in en and "| 8 | own | vllm |" not in en
    assert "| 64 | blinkpy-8192 | 5 | 5 | 900 |" in en
    assert "`blinkpy-8192` takes up to 8,192 tokens into a step" in en and "blinkpy-8192" not in em
    assert "blinkpy at 2, 8 and 32 requests/s, isolated and interfered" in em


def test_variants_and_what_ran_beside_are_said() -> None:
    cells = [
        cell("blinkpy", "isolated", 16, 8.0, server={"command": "serve {model} --workers 2"}),
        cell("blinkpy-even", "isolated", 16, 7.0, server={"command": "serve {model} --workers 2 --policy p --steps 2"}),
        cell("other", "isolated", 16, 7.0, server={"command": "serve {model}"}, beside={"waited_s": 1.0, "benchmarks": ["en"]}),
    ]
    text = " ".join(shown("serving", serving({"Em": document(cells)})).split())
    assert "`blinkpy-even` is blinkpy with `--policy p --steps 2`. Beside it en was measured." in text
    assert "`other`" not in text and "`blinkpy`" not in text
    assert "| 0 | own | blinkpy-even |" in text
    assert "Beside it" not in shown("serving", serving({"Em": document(CELLS)}))
    assert "Beside it en was measured" in grid_page(document(cells)["results"])


def test_page_of_plots() -> None:
    """What is drawn of each cell: filled, hollow where many requests were not answered, crossed where the client fell behind."""
    lagging = {"lag_ms": {"p50": 0.1, "p99": 9.0}}
    cells = [
        cell("blinkpy", "isolated", 2, 4.0, requests=100),
        cell("blinkpy", "isolated", 16, 8.0, requests=100, client=lagging),
        cell("vllm", "isolated", 2, 5.0, requests=100, errors={"unfinished": 2}),
        cell("vllm", "isolated", 16, 9.0, requests=100, errors={"unfinished": 1}),
        cell("vllm", "isolated", 16, 1.0, requests=100, front_end="shared"),
    ]
    figure = draw(document(cells)["results"])
    left = figure.axes[0]
    marks = {(x, y): line for line in left.lines if line.get_marker() != "None" for x, y in zip(*line.get_data(), strict=True)}
    assert set(marks) == {(2, 12.0), (16, 24.0), (2, 15.0), (16, 27.0)}  # P99 TTFT
    assert marks[16, 24.0].get_marker() == "x"
    faces = {where: line.get_markerfacecolor() == "white" for where, line in marks.items()}
    assert faces == {(2, 12.0): False, (16, 24.0): False, (2, 15.0): True, (16, 27.0): False}
    assert (left.get_ylabel(), left.get_xlabel()) == ("P99 TTFT, ms", "requests/s")


def test_energy_of_a_token_is_taken_apart() -> None:
    ours = cell("blinkpy", "isolated", 2, 10.0, steps={"per_s": 50.0, "tokens": 2.0}, energy={"mean_w": 300.0})
    peers = cell("vllm", "isolated", 2, 10.0, steps={"per_s": 50.0, "tokens": 3.0}, energy={"mean_w": 200.0})
    lost = cell("blinkpy", "isolated", 8, 10.0, steps=None, energy={"mean_w": 300.0})
    assert energy_rows(document([ours, peers, lost])["results"]) == [
        ["2 requests/s", "3 / 1.33", "2.25 = 1.50 x 1.50"],
    ]


REPORT = """<testsuites><testsuite name="pytest" time="90" timestamp="2026-01-02T03:04:05">
<testcase classname="tests.gpu.a" name="test_x[1]"/>
<testcase classname="tests.gpu.a" name="test_x[1]"><error message="teardown"/></testcase>
<testcase classname="tests.gpu.a" name="test_y"/>
<testcase classname="tests.gpu.b" name="test_y"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_commit_that_is_told_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKPY_COMMIT", "0123456789" * 4)
    assert revision() == {"hash": "0123456789" * 4, "dirty": False}
    monkeypatch.setenv("BLINKPY_COMMIT", "0123456")
    with pytest.raises(UsageError, match="not a whole commit hash"):
        revision()


def test_what_the_gpu_tests_said(tmp_path: Path) -> None:
    """Two runs: an error in a teardown counts, and what one run skipped and the other passed is not passed."""
    (tmp_path / "one.xml").write_text(REPORT)
    (tmp_path / "two.xml").write_text(REPORT.replace('<skipped message="no"/>', "").replace("test_x", "test_z"))
    runs = [read_report(tmp_path / name) for name in ("one.xml", "two.xml")]
    tests = joined(runs)
    assert tests == {
        "failed": ["tests.gpu.a::test_x[1]", "tests.gpu.a::test_z[1]"],
        "skipped": ["tests.gpu.b::test_y"],
        "passed": 1,
    }
    environment = {"gpu": "G", "date": "2026-01-02T03:04:05", "commit": {"hash": "0123456789" * 4, "dirty": False}}
    text = gpu_tests({"environment": environment, "runs": runs, "tests": tests})
    assert text.startswith("1 of 4 tests of `tests/gpu` passed on one G at `0123456`, 2026-01-02, in 1.5 and 1.5 minutes")
    assert "; 2 failed, 1 skipped." in text
    later = [runs[0], runs[1] | {"commit": "9876543210" * 4}]
    assert "at `0123456` and `9876543`, 2026" in gpu_tests({"environment": environment, "runs": later, "tests": tests})
    assert "- failed: `tests.gpu.a::test_z[1]`\n- skipped: `tests.gpu.b::test_y`" in text
    (tmp_path / "ended.xml").write_text(REPORT.replace("</testsuite>", '<testcase time="0.001"/></testsuite>'))
    assert "a test that was cut off" in joined([read_report(tmp_path / "ended.xml")])["failed"]
    (tmp_path / "cut.xml").write_text(REPORT[:100])
    with pytest.raises(UsageError, match="cut"):
        read_report(tmp_path / "cut.xml")
