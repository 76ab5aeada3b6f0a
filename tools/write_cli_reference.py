"""Print docs/cli.md: the commands and options of `blinkpy.config`. `make docs` writes the page."""

import dataclasses
import re
import textwrap
from itertools import groupby
from typing import Any

from blinkpy import cli
from blinkpy.config import ALL, COMMANDS, help_text, option_type, options
from blinkpy.serving import load_choices

HEAD = """\
# Command line

For users. `make docs` writes this page from the options in the code.

    blinkpy serve [MODEL]      start an engine and front ends, and supervise them
    blinkpy engine [MODEL]     start only an engine, for front ends on this machine (--name) or others (--listen)
    blinkpy frontend [MODEL]   start only front ends, for an engine on this machine (--name) or another (--engine)
    blinkpy check-model MODEL  check whether a model can be served, and how much memory it needs
    blinkpy check POLICY       check a scheduling policy, and compare it with the shipped ones
    blinkpy check --fleet N    check how requests are placed on the engines of a fleet
    blinkpy record [NAME]      save the recording of a running engine: its last steps
    blinkpy replay FILE        run a recording again, and explain what happened and why
    blinkpy ray up CONFIG      start engines and front ends in a Ray cluster (docs/fleet.md)
    blinkpy top [SERVERS]      watch running servers in a terminal
    blinkpy doctor             check whether this machine is ready for --transport rdma
    blinkpy --version

MODEL is short for `--model MODEL`. The first source that sets an option wins: its flag, the environment variable
`BLINKPY_API_KEY` (for `--api-key`), the TOML file of `--config`, its default. The file sets options by name, at its top level
or in tables named like the sections below:

    model = "demo"
    [frontend]
    port = 9000

In parentheses: the default, then the range or the other values. `--no-NAME` turns off an option that is `on`.

Errors are one line, `blinkpy: error: ...`. Exit codes: 0 after an orderly shutdown (also by Ctrl-C or SIGTERM), 1 after a
failure at run time, 2 for wrong options or a model that can't be served.
"""
SAME = "same as for blinkpy serve"


def main() -> None:
    load_choices()
    server = {item.name: item for _, item in options()}
    print(HEAD, end="")
    for section, entries in groupby(options(), key=lambda entry: entry[0]):
        items = [item for _, item in entries]
        print(f"\n## {section}\n")
        print_wrapped(f"{cli.section_help(section)} {commands(section, items)}")
        print()
        for item in items:
            print_option(cli.flag(item), item)
    for tool in cli.TOOLS:
        items = list(dataclasses.fields(tool.options()))
        same = [item for item in items if item.name in server and is_same(item, server[item.name])]
        print(f"\n## blinkpy {tool.name}\n")
        print_wrapped(cli.section_line(tool.options()))
        print()
        for item in items:
            if item not in same:
                print_option(item.name.upper() if item.name == tool.argument.rstrip("?*") else cli.flag(item), item)
        if same:
            print_wrapped(f"- {', '.join(f'`{cli.flag(item)}`' for item in same)}: same as for the server.")


def is_same(item: dataclasses.Field[Any], servers: dataclasses.Field[Any]) -> bool:
    """Whether a tool's option is described like the server's."""
    return item.metadata["help"] in (SAME, servers.metadata["help"]) and values(item) == values(servers)


def print_option(name: str, item: dataclasses.Field[Any]) -> None:
    shown = f" ({values(item)})" if values(item) else ""
    print_wrapped(f"- `{name}`{shown}: {help_text(item)}")


def print_wrapped(line: str) -> None:
    line = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", line)
    indent = "  " if line.startswith("- ") else ""
    print(textwrap.fill(line, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def values(item: dataclasses.Field[Any]) -> str:
    """The default of an option, and its bounds or other choices."""
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    default = ("on" if item.default else "off") if option_type(item) is bool else item.default
    others = ", ".join(choice for choice in choices if choice != default) if low is None else f"{low}..{high}"
    return f"{default}; {others}".removesuffix("; ")


def commands(section: str, items: list[dataclasses.Field[Any]]) -> str:
    """A sentence with the commands of a section, and of options whose commands differ."""
    usual, unusual = COMMANDS[section], dict[str, list[str]]()
    for item in items:
        names = item.metadata["commands"].replace(" doctor", "") or usual
        if names != usual:
            unusual.setdefault(names, []).append(f"`{cli.flag(item)}`")
    ends = [f"for {names_of(names)}: {', '.join(flags)}" for names, flags in unusual.items()]
    return "; ".join([f"For {names_of(usual)}", *ends]) + "."


def names_of(names: str) -> str:
    return "all three" if names == ALL else " and ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    main()
