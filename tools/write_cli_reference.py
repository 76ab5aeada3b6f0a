"""Print docs/cli.md: the commands and options as `blinkpy.config` has them. `make docs` writes the page."""

import dataclasses
from itertools import groupby
from typing import Any

from blinkpy import cli
from blinkpy.config import help_text, option_type, options

HEAD = """\
# Command line

This page is generated from the options in `blinkpy/config.py` by `make docs`; a test checks that it is current.

    blinkpy serve [MODEL] [options]      an engine and front ends, as processes that `serve` looks after
    blinkpy engine [MODEL] [options]     an engine alone, for front ends on this machine (--name) or others (--listen)
    blinkpy frontend [MODEL] [options]   front ends alone, for an engine on this machine (--name) or another (--engine)
    blinkpy check-model MODEL [options]  look whether a model can be served and what it needs, before its weights are read
    blinkpy check POLICY [options]       check a scheduling policy, and compare it with the shipped ones
    blinkpy check --fleet N [options]    check how requests are placed on the engines of a fleet
    blinkpy record [NAME] [options]      save the last steps of a running engine
    blinkpy replay FILE [options]        run saved steps again, and tell what happened and why
    blinkpy top [SERVERS] [options]      watch running servers, in a terminal
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
    cli.load_choices()
    halves = {item.name: "" for _, item in options()}
    for half in ("engine", "frontend"):
        for _, item in options(half):
            halves[item.name] = (halves[item.name] + ", " + half).lstrip(", ")
    print(HEAD)
    for section, entries in groupby(options(), key=lambda entry: entry[0]):
        print(
            f"## {section}\n\n{cli.section_help(section)}\n\n| option | default | bounds | of | meaning |\n|---|---|---|---|---|"
        )
        for _, item in entries:
            flag, default, bounds = spelled(item)
            print(f"| `{flag}` | {default} | {bounds} | {halves[item.name]} | {help_text(item)} |")
        print()
    for tool in cli.TOOLS:
        print(f"## blinkpy {tool.name}\n\n{cli.section_line(tool.options())}\n")
        print("| option | default | bounds | meaning |\n|---|---|---|---|")
        for item in dataclasses.fields(tool.options()):
            flag, default, bounds = spelled(item)
            shown = item.name.upper() if item.name == tool.argument.rstrip("?*") else f"`{flag}`"
            print(f"| {shown} | {default} | {bounds} | {item.metadata['help']} |")
        print()


def spelled(item: dataclasses.Field[Any]) -> tuple[str, object, str]:
    """Flag, default and bounds of an option, as the tables show them."""
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    flag, default = cli.flag(item), item.default
    if option_type(item) is bool:
        flag, default = f"{flag}`, `--no-{flag[2:]}", "on" if default else "off"
    bounds = ", ".join(choices) if choices else "" if low is None else f"{low} to {high}"
    return flag, default, bounds


if __name__ == "__main__":
    main()
