"""Lines of Python by folder, as `make lint` prints them: growth is explained in the commit.

python tools/sizes.py [--markdown] [--against COMMIT]
"""

import argparse
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"blinkpy": 25_500, "benchmarks": 5_500, "tests": 17_000}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def folder_of(path: str) -> str:
    """The folder that a file counts for: two levels deep in the package, one elsewhere."""
    parts = Path(path).parts
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def lines_now() -> Counter[str]:
    """Lines of each folder of the work tree, new files included."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    sizes: Counter[str] = Counter()
    for path in listed:
        file = ROOT / path
        if file.is_file():
            sizes[folder_of(path)] += len(file.read_bytes().splitlines())
    return sizes


def lines_at(commit: str) -> Counter[str]:
    """Lines of each folder at a commit."""
    sizes: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if path.endswith(".py"):
            sizes[folder_of(path)] += len(git("show", f"{commit}:{path}").splitlines())
    return sizes


def rows(sizes: Counter[str], before: Counter[str] | None) -> list[tuple[str, ...]]:
    """Folder, lines and, with an earlier state, the change; totals of the top folders first."""
    found: list[tuple[str, ...]] = []
    for top in sorted({name.split("/")[0] for name in sizes}):
        inside = [name for name in sorted(sizes) if name.split("/")[0] == top]
        for name, group in [(top, inside), *((name, [name]) for name in inside if "/" in name)]:
            now = sum(sizes[one] for one in group)
            limit = f"of {LIMITS[name]:,}" if name in LIMITS else ""
            change = "" if before is None else f"{now - sum(before[one] for one in group):+,}"
            found.append((name, f"{now:,}", limit, change))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines of Python by folder.")
    parser.add_argument("--markdown", action="store_true", help="as a table for a page")
    parser.add_argument("--against", metavar="COMMIT", help="show the change since a commit")
    options = parser.parse_args()
    table = rows(lines_now(), lines_at(options.against) if options.against else None)
    if options.markdown:
        print("| folder | lines | goal |\n|---|---|---|")
        for name, lines, limit, _ in table:
            print(f"| `{name}/` | {lines} | {limit.removeprefix('of ')} |")
        return
    for name, lines, limit, change in table:
        print(f"{'  ' if '/' in name else ''}{name:<28}{lines:>8} {limit:<10}{change:>8}")


if __name__ == "__main__":
    main()
