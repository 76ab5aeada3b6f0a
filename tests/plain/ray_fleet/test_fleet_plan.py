"""The file of `blinkpy ray up`: its results, and the errors with names."""

from pathlib import Path
from typing import Any

import pytest

from blinkpy.cli import main
from blinkpy.config import ConfigError
from blinkpy.ray_fleet.fleet_plan import FleetPlan, read_plan
from blinkpy.ray_fleet.ray_cluster import home_node
from blinkpy.ray_fleet.scaling_rule import ScaleTargets
from blinkpy.tool_options import RayOptions


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.toml"


def plan(file: Path, text: str) -> FleetPlan:
    file.write_text(text)
    return read_plan(str(file))


def test_a_file_has_usual_options_and_three_tables(file: Path) -> None:
    found = plan(
        file,
        """
model = "demo"
max_moves = 5
[frontend]
port = 9000
workers = 2
[engine]
device = "cpu"
[engines]
least = 2
most = 4
cpus = 0.5
[front_ends]
number = 3
[scale]
requests = 10
interval_s = 1
""",
    )
    assert (found.config.frontend.port, found.config.engine.device) == (9000, "cpu")
    assert (found.engines.least, found.most, found.engines.cpus, found.engine_gpus) == (2, 4, 0.5, 0.0)
    assert [found.port(number) for number in range(found.front_ends.number)] == [9000, 9001, 9002]
    assert found.scale == ScaleTargets(requests=10, interval_s=1)
    assert found.engine_config().frontend.workers == 6, "a queue pair for each worker of all front ends"
    assert not found.crosses_machines
    shortest = plan(file, "")
    assert (shortest.engines.least, shortest.most, shortest.engine_gpus) == (1, 1, 1.0)
    assert plan(file, "[engine]\ntensor_parallel_size = 4\n").engine_gpus == 4.0
    with pytest.raises(ConfigError, match=r"engines\.gpus must be 1 with tensor_parallel_size above 1, not 0\.5"):
        plan(file, "[engine]\ntensor_parallel_size = 4\n[engines]\ngpus = 0.5\n")
    far = plan(file, 'transport = "rdma"\ninsecure_link = true\n')
    assert far.crosses_machines


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model = ", "is not TOML"),
        ('modle = "demo"', "unknown option 'modle'; did you mean 'model'?"),
        ("[engines]\nlest = 1", "unknown option 'engines.lest'; did you mean 'least'?"),
        ("[front_end]\nnumber = 1", "unknown table 'front_end'; did you mean 'front_ends'?"),
        ("[scaling]\nrequests = 1", "unknown table 'scaling'; did you mean 'scale'?"),
        ("[scale]\nrequest = 1", "unknown option 'scale.request'; did you mean 'requests'?"),
        ("[scale]\nrequests = -1", "scale.requests must be 0 to"),
        ("[scale]\ndown_s = 'soon'", "scale.down_s must be float, not str"),
        ("[scale]\ninterval_s = 0.1\ndown_s = 2000", "at most 10000 times scale.interval_s"),
        ("engines = 3", "engines must be a table"),
        ("[serve]\nroute = '/llm'", "unknown option"),
        ("[engines]\nleast = 0", "engines.least must be 1 to 64, not 0"),
        ("[engines]\nleast = true", "engines.least must be int, not bool"),
        ("[engines]\nleast = 3\nmost = 2", r"engines.most \(2\) must be at least engines.least \(3\)"),
        ("[engines]\ngpus = 2", "engines.gpus must be 0 to 1, not 2"),
        ("[engines]\ngpus = 0", "engines.gpus 0 needs device cpu or null"),
        ("[engines]\nmost = 2\n[scale]\nrequests = 0\nfree_pages = 0", "needs a target"),
        ("port = 0", "port must be 1 to 65535 with 1 front ends, not 0"),
        ("port = 65535\n[front_ends]\nnumber = 2", "port must be 1 to 65534 with 2 front ends"),
        ("port = 70000", "port must be 0 to 65535"),
        ("name = 'x'", "remove name: engines get generated names"),
        ("engine = 'a,b'", "remove engine: front ends get all engines"),
        ("engines_file = 'x'", "remove engines_file"),
        ("data_parallel_size = 2", "remove data_parallel_size"),
        ("uds = '/tmp/x'", "remove uds"),
        ("transport = 'rdma'", "needs link_key_file with a path that exists on every node, or insecure_link"),
        ("grammar_slots = 3\nworkers = 2\n[front_ends]\nnumber = 2", "grammar_slots"),
        ("placement = 'fastest'", "placement must be"),
    ],
)
def test_a_file_that_can_not_be_is_refused(file: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        plan(file, text)
    assert str(file) in str(refusal.value) or "70000" in text


def test_front_ends_have_ports_in_turn(file: Path) -> None:
    found = plan(file, "root_path = '/x'\n[front_ends]\nnumber = 2")
    assert [found.front_end_config(n).frontend.port for n in range(2)] == [8000, 8001]
    assert found.front_end_config(0).access.root_path == "/x"


def test_the_example_of_the_page_is_a_plan(file: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text()
    lines = page.partition("## Ray\n")[2].partition("\n## ")[0].splitlines()
    found = plan(file, "\n".join(line.strip() for line in lines if line.startswith("    ")))
    assert found.most == 4 and found.front_ends.number == 1
    assert found.scale == ScaleTargets(), "it shows the defaults"


def test_a_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*fleet.toml: No such file"):
        read_plan(str(file))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "missing action of ray; use: ray up CONFIG"),
        (["down", "x.toml"], "unknown action 'down' of ray; use: ray up CONFIG"),
        (["up"], "missing file; use: ray up CONFIG"),
        (["up", "no/such.toml"], "can't read no/such.toml"),
        (["up", "x.toml", "--adress", "auto"], "did you mean '--address'?"),
    ],
)
def test_the_command_refuses_what_is_wrong(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_path_may_have_spaces() -> None:
    assert RayOptions("up my fleet.toml").path == "my fleet.toml"


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_what_shares_memory_is_placed_on_one_node(file: Path) -> None:
    two = plan(file, "[engines]\nleast = 2\n[front_ends]\ncpus = 1")
    nodes = [node("small", GPU=1.0, CPU=8.0), node("dead", False, GPU=16.0, CPU=8.0), node("big", GPU=8.0, CPU=8.0)]
    assert home_node([*nodes, node("middle", GPU=4.0, CPU=64.0)], two) == "big"
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 2 GPU and 1 CPU"):
        home_node(nodes[:2], two)
    null = plan(file, "device = 'null'")
    assert home_node([node("a", CPU=2.0), node("b", CPU=4.0)], null) == "b"
    dpu = plan(file, "device = 'null'\n[front_ends]\nresource = 'dpu'")
    assert home_node([node("a", CPU=2.0, dpu=1.0), node("b", CPU=4.0)], dpu) == "a"
    with pytest.raises(ConfigError, match="has dpu, as"):
        home_node([node("b", CPU=4.0)], dpu)
