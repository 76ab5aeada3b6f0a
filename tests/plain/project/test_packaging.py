"""The contents of an installation, and the packages that a base install does not need."""

import configparser
import email.message
import email.parser
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.import_graph import imports_of, package_modules

import blinkpy
from blinkpy.config import FrontendOptions
from blinkpy.dpu.supervisor import END_GRACE_S
from blinkpy.serving.frontend_process import PACKAGES
from blinkpy.version import __version__ as VERSION

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "numba", "llvmlite", "triton", "cuda", "transformers", "safetensors", "pyverbs")

# Runs code with the heavy packages made impossible to import, as on a DPU.
BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def without_heavy(code: str) -> subprocess.CompletedProcess[str]:
    return python(BLOCKED + code)


def test_the_block_works() -> None:
    assert "blocked: torch" in without_heavy("import torch").stderr


def test_the_base_install_imports_without_torch_numba_and_triton() -> None:
    """The front end; and of models their descriptions, folders and the headers of their checkpoints."""
    modules = [name for name in package_modules() if name.startswith(("blinkpy.dpu.", "blinkpy.transport.", "blinkpy.queues."))]
    modules += ["blinkpy.models.weights.checkpoint", "blinkpy.models.weights.model_folder"]
    done = without_heavy(
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "from blinkpy.models.families.family import families; families()"
    )
    assert done.returncode == 0, done.stderr


COMMANDS = ("frontend", "serve", "engine", "check", "record", "replay")


@pytest.mark.parametrize("arguments", [["--version"], *([command, "--help"] for command in COMMANDS)])
def test_commands_explain_themselves_without_torch_numba_and_triton(arguments: list[str]) -> None:
    done = without_heavy(f"from blinkpy.cli import main\nsys.exit(main({arguments!r}))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_an_engine_without_its_extra_says_what_to_install() -> None:
    done = without_heavy("from blinkpy.cli import main\nsys.exit(main(['engine', '--device', 'null']))")
    assert done.returncode == 2
    assert re.search(r"^blinkpy: error: an engine needs \w+: pip install 'blinkpy-serve\[cpu\]'\n\Z", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("command", ["frontend", "serve"])
def test_a_front_end_without_its_packages_says_what_to_install(command: str) -> None:
    code = f"""
import sys
sys.modules["httptools"] = sys.modules["orjson"] = None  # as if they were not installed
from blinkpy.cli import main
sys.exit(main([{command!r}, "--port", "0"]))
"""
    done = python(code)
    expected = "blinkpy: error: a front end needs httptools, orjson: pip install blinkpy-serve\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_what_a_front_end_looks_for_is_what_it_imports() -> None:
    files = (ROOT / "blinkpy" / "dpu").rglob("*.py")
    imported = {module.partition(".")[0] for file in files for module, _ in imports_of(file)}
    others = {"blinkpy", "numpy", "pyverbs", "opentelemetry"}  # NumPy comes with the first import; the others are for some alone
    assert imported - sys.stdlib_module_names - others == set(PACKAGES)


def test_import_is_light_and_the_offline_api_is_there() -> None:
    code = """
import sys, blinkpy
assert "numpy" not in sys.modules
from blinkpy import LLM, SamplingParams
assert "torch" not in sys.modules
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="nothing"):
        _ = blinkpy.nothing


def test_serve_starts_its_processes_before_anybody_imports_the_tokenizer() -> None:
    late = {"jinja2", "tokenizers", "numba", "torch"}
    done = python(f"import sys, blinkpy.serving.serve\nprint(*sorted({late!r} & sys.modules.keys()))")
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_an_engine_on_the_cpu_imports_with_torch_and_without_triton() -> None:
    """torch's CPU build brings no Triton."""
    parts = ("blinkpy.models.cpu.", "blinkpy.models.weights.", "blinkpy.models.paged_cache", "blinkpy.engine.devices.host_")
    modules = [name for name in package_modules() if name.startswith(parts)]
    assert "blinkpy.models.cpu.torch_decoder" in modules and "blinkpy.models.weights.packed_loader" in modules
    code = "import importlib, sys\nsys.modules['triton'] = None  # as if it were not installed\n"
    done = python(f"{code}for name in {modules!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_every_dependency_is_justified_with_its_range() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_dependencies.py"))
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert tool["written"](page) == page, "run `make docs`"
    rows = dict(re.findall(r"^\| ([\w-]+)(?:\[\w+\])? \| ([^|]+) \|", page, re.MULTILINE))
    wanted = [one for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for one in group]
    names = {re.match(r"[\w-]+", one)[0] for one in wanted}  # type: ignore[index]
    assert names - set(rows) == {"blinkpy-serve"}
    with pytest.raises(ValueError, match="one of new has no comment"):
        tool["table"]("new", 'new = [\n    "one>=1,<2",\n]')
    text = 'new = [\n    "one[x]>=1,<2",  # it helps\n]'
    assert tool["table"]("new", text).endswith("| one[x] | >=1, <2 | it helps |\n")


SOURCES = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = (*(ROOT / name for name in TOP_PAGES), *sorted((ROOT / "docs").glob("*.md")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path) -> None:
    """Links lead to a file and to a heading in it; paths in backticks are there."""
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"
    for path in re.findall(r"`((?:blinkpy|tests|benchmarks|tools|docs|systemd)/[\w./-]+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path
    for path in re.findall(r"`([\w/]+\.py)`", text):  # perhaps without the folders above
        assert "NAME" in path or any(source.endswith(f"/{path}") for source in SOURCES), path


def test_makefile_and_ci_agree_with_the_readme() -> None:
    makefile, readme, ci = ((ROOT / name).read_text() for name in ("Makefile", "README.md", ".ci/run"))
    assert {"serve", "test", "lint"} <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert [target for target in ("make serve", "make test") if target not in readme] == []
    assert [target for target in ("make test", "make lint") if target not in ci] == []


def built_metadata(folder: Path, address: str) -> tuple[email.message.Message, str]:
    """A wheel's metadata, from the build backend: fields, and the long description."""
    code = f"from hatchling.build import prepare_metadata_for_build_wheel as made; print(made({str(folder)!r}))"
    environment = os.environ | {"BLINKPY_TREE_URL": address}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    found = email.parser.Parser().parsestr((folder / done.stdout.split()[-1] / "METADATA").read_text())
    return found, str(found.get_payload())


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def plain(text: str) -> str:
    """The visible text of a page: without comments, pictures and the targets of links; and without empty lines."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    return re.sub(r"\n+", "\n", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)).strip()


def test_a_package_page_has_no_broken_link(tmp_path: Path) -> None:
    """Without an address, no link from the README to a file is left, and no word is lost."""
    readme = (ROOT / "README.md").read_text()
    fields, text = built_metadata(tmp_path, "")
    assert (fields["Name"], fields["Description-Content-Type"], fields["Version"]) == (PROJECT["name"], "text/markdown", VERSION)
    assert links(text) == [target for target in links(readme) if "://" in target]
    assert fields["Project-URL"] is None
    assert plain(text) == plain(readme)


def test_with_an_address_all_links_lead_there(tmp_path: Path) -> None:
    address = "https://example.org/blinkpy/blob/v1"
    readme = (ROOT / "README.md").read_text()
    fields, text = built_metadata(tmp_path, address + "/")
    expected = [target if "://" in target else f"{address}/{target}" for target in links(readme)]
    assert (links(text), len(expected) > 10) == (expected, True)
    for url in fields.get_all("Project-URL"):
        name, target = url.split(", ")
        assert name and target.startswith(address)
        assert (ROOT / target.removeprefix(address).lstrip("/")).exists()


@pytest.mark.parametrize("unit", sorted((ROOT / "systemd").glob("*.service")), ids=lambda unit: unit.stem)
def test_units_let_requests_finish(unit: Path) -> None:
    """systemd signals only the main process: workers get SIGTERM from their parent, and a second one ends
    streams immediately."""
    read = configparser.ConfigParser(strict=False)
    read.optionxform = str  # type: ignore[method-assign, assignment]
    read.read_string(unit.read_text())
    service = read["Service"]
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > FrontendOptions().shutdown_s + END_GRACE_S
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
