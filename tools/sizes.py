"""Lines with code and tokens of Python, by folder: `make lint` prints them.

A line counts if it holds a token that is neither a comment nor a docstring. Tokens per line show how dense lines are,
so joining lines gains nothing.

    python tools/sizes.py [--against COMMIT]
"""

import argparse
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def size_of(source: str) -> tuple[int, int]:
    """Lines with code, and tokens."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NO_CODE]
    tokens = [
        token for token in tokens if not (token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""')))
    ]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)}), len(tokens)


def sizes(sources: dict[str, str]) -> dict[str, Counter[str]]:
    """Lines and tokens of the folders of files, two levels deep in the package and one elsewhere. sources: texts by path."""
    found: dict[str, Counter[str]] = {}
    for path, source in sources.items():
        parts = Path(path).parts
        lines, tokens = size_of(source)
        for folder in {parts[0], "/".join(parts[: 2 if len(parts) > 2 else 1])}:
            found.setdefault(folder, Counter()).update(files=1, lines=lines, tokens=tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines with code and tokens of Python by folder.")
    parser.add_argument("--against", metavar="COMMIT", help="show the change of lines since a commit")
    commit = parser.parse_args().against
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    now = sizes({name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()})
    listed = git("ls-tree", "-r", "--name-only", commit).splitlines() if commit else []
    before = sizes({name: git("show", f"{commit}:{name}") for name in listed if name.endswith(".py")})
    print(f"{'':<28}{'files':>8}{'lines':>8}{'tokens a line':>15}")
    for name, size in sorted(now.items()):
        change = f"{size['lines'] - before.get(name, Counter())['lines']:+,}" if commit else ""
        density = size["tokens"] / max(size["lines"], 1)
        print(f"{'  ' * ('/' in name) + name:<28}{size['files']:>8,}{size['lines']:>8,}{density:>15.1f}{change:>10}".rstrip())


if __name__ == "__main__":
    main()
