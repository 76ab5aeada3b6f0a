"""Print docs/cli.md: the commands and options as `blinkpy.config` has them. `make docs` writes the page."""

from __future__ import annotations

from itertools import groupby

from blinkpy import cli
from blinkpy.config import option_type, options

HEAD = """\
# Command line

This page is generated from the options in `blinkpy/config.py` by `make docs`; a test checks that it is current.

    blinkpy serve [MODEL] [options]      an engine and front ends, as processes that `serve` looks after
    blinkpy engine [MODEL] [options]     an engine alone, for front ends on this machine (--name) or others (--listen)
    blinkpy frontend [MODEL] [options]   front ends alone, for an engine on this machine (--name) or another (--engine)
    blinkpy doctor [options]             look whether this machine is ready for --transport rdma
    blinkpy --version

MODEL is the same as `--model`. A value comes from the first of these that gives one: the flag, the environment variable
(`BLINKPY_API_KEY` for `--api-key`), the TOML file of `--config`, the default. The file holds options by name, at its top
level or in tables named like the sections below:

    model = "demo"
    [frontend]
    port = 9000

Errors are one line, `blinkpy: error: ...`. Exit codes: 0 after an orderly end (also by Ctrl-C or SIGTERM), 1 when something
failed at run time, 2 for wrong options or a model that can't be served.
"""


def main() -> None:
    halves = {item.name: "" for _, item in options()}
    for half, chosen in (("engine", cli.engine_options()), ("frontend", cli.frontend_options())):
        for _, item in chosen:
            halves[item.name] = (halves[item.name] + ", " + half).lstrip(", ")
    print(HEAD)
    for section, entries in groupby(options(), key=lambda entry: entry[0]):
        print(
            f"## {section}\n\n{cli.section_help(section)}\n\n| option | default | bounds | of | meaning |\n|---|---|---|---|---|"
        )
        for _, item in entries:
            low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
            flag = cli.flag(item)
            default = item.default
            if option_type(item) is bool:
                flag, default = f"{flag}`, `--no-{flag[2:]}", "on" if default else "off"
            bounds = ", ".join(choices) if choices else "" if low is None else f"{low} to {high}"
            print(f"| `{flag}` | {default} | {bounds} | {halves[item.name]} | {item.metadata['help']} |")
        print()


if __name__ == "__main__":
    main()
