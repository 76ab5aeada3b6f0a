"""The manifest of sources: the changes that alter a digest, and that all users of the sources ask it."""

import shutil
from pathlib import Path

import pytest

from blinkpy.sources import DEVICE_CODE, PACKAGE, SCHEDULER, source_digest, source_files


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sources."""
    copy = tmp_path / "blinkpy"
    for file in source_files(DEVICE_CODE):
        target = copy / file.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return copy


@pytest.mark.parametrize("parts", [SCHEDULER, DEVICE_CODE], ids=["scheduler", "device code"])
def test_an_edited_a_moved_and_a_new_file_change_the_digest(package: Path, parts: tuple[str, ...]) -> None:
    digests = [source_digest(parts, package)]
    assert digests == [source_digest(parts)]  # a copy has the digest of the original
    edited = source_files(parts, package)[-1]
    edited.write_text(edited.read_text() + "\n# edited\n")
    digests.append(source_digest(parts, package))
    folder = package / parts[0] / "new_folder" / "deeper"
    folder.mkdir(parents=True)
    edited = edited.rename(folder / edited.name)
    digests.append(source_digest(parts, package))
    (folder / "new.py").touch()  # an empty file alone
    digests.append(source_digest(parts, package))
    (folder / "new.py").rename(folder / "renamed.py")
    digests.append(source_digest(parts, package))
    assert len(set(digests)) == len(digests)


def test_other_files_change_no_digest(package: Path) -> None:
    before = source_digest(DEVICE_CODE, package)
    (package / "kernels" / "README.md").write_text("Nothing that compiles.")
    (package / "dpu").mkdir()
    (package / "dpu" / "app.py").touch()
    assert source_digest(DEVICE_CODE, package) == before


def test_text_does_not_wander_between_files(package: Path) -> None:
    first, second, *_ = (package / "kv").glob("*.py")
    text = first.read_text() + second.read_text()
    digests = set()
    for cut in (len(text) // 3, len(text) // 2):
        first.write_text(text[:cut])
        second.write_text(text[cut:])
        digests.add(source_digest(("kv",), package))
    assert len(digests) == 2


def test_a_missing_package_is_an_error(package: Path) -> None:
    shutil.rmtree(package / "kv")
    with pytest.raises(FileNotFoundError, match="blinkpy has no kv"):
        source_digest(SCHEDULER, package)


def test_a_move_that_keeps_the_order_of_files_changes_the_digest(tmp_path: Path) -> None:
    """With a single file, only its path differs."""
    (tmp_path / "part" / "below").mkdir(parents=True)
    file = tmp_path / "part" / "one.py"
    file.write_text("ONE = 1\n")
    before = source_digest(("part",), tmp_path)
    file.rename(tmp_path / "part" / "below" / "one.py")
    assert source_digest(("part",), tmp_path) != before
