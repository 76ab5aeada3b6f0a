"""The command `blinkpy`: its options are generated from the dataclasses of `blinkpy.config`.

An option's value comes from the first of these that gives one: a flag, an environment variable (ENVIRONMENT), the file
named by --config, the default. Errors are one line. Exit codes: 0 fine, 1 a failure at run time, 2 wrong usage or options.
"""

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from blinkpy.config import Config, ConfigError, check_asked, help_text, load_file, meant, option_type, options
from blinkpy.serving.option_choices import load_choices
from blinkpy.version import __version__

ENVIRONMENT = {"BLINKPY_API_KEY": "api_key"}


class Command(NamedTuple):
    """A subcommand with the options of blinkpy.config that name it.

    function: "module:function" below blinkpy, which gets the config and the names of the options that somebody gave, and returns
    the exit code. model: whether it is about one.
    """

    name: str
    help: str
    function: str
    model: bool = True

    def run(self, arguments: Mapping[str, Any]) -> int:
        return int(loaded(self.function)(*resolve(arguments, os.environ)))


class Tool(NamedTuple):
    """A subcommand that serves nobody, with a dataclass of options of its own.

    argument: its field that is given without a flag, "?" after it if it may be missing, "*" if there may be any number. prefix:
    of its two modules below blinkpy: prefix_options has the class NameOptions, prefix_command the function run_NAME, from an
    instance to the exit code.
    """

    name: str
    help: str
    argument: str
    prefix: str

    def options(self) -> type:
        kind: type = loaded(f"{self.prefix}_options:{self.name.title().replace('-', '')}Options")
        return kind

    def run(self, arguments: Mapping[str, Any]) -> int:
        values = {name: " ".join(value) if isinstance(value, list) else value for name, value in arguments.items()}
        return int(loaded(f"{self.prefix}_command:run_{self.name.replace('-', '_')}")(self.options()(**values)))


ENGINE = "start an engine alone; front ends attach to it by --name, or over RDMA"
FRONT_END = "start front ends alone, for an engine of this --name, or over RDMA"
COMMANDS = (
    Command("serve", "serve a model over HTTP: starts an engine and front ends", "serving.serve:serve"),
    Command("engine", ENGINE, "serving.engine_process:engine_alone"),
    Command("frontend", FRONT_END, "serving.frontend_process:frontend_alone"),
    Command("doctor", "look whether this machine is ready for --transport rdma", "doctor:doctor", model=False),
)
MODEL_HELP = "look whether a model can be served and what it needs, before its weights are read"
CHECK, REPLAY = "verify.policy_check.check", "verify.replay.replay"
TOOLS = (
    Tool("check-model", MODEL_HELP, "model", "serving.model_check"),
    Tool("check", "check a scheduling policy, or a placement, and compare it with the shipped ones", "policy?", CHECK),
    Tool("record", "save the last steps of a running engine", "name?", REPLAY),
    Tool("replay", "run saved steps again, and tell what happened and why", "file", REPLAY),
    Tool("ray", "place engines and front ends in a Ray cluster, watch and scale them", "action*", "ray_fleet.ray"),
    Tool("top", "watch running servers, in a terminal", "servers*", "top.top"),
)


def loaded(name: str) -> Any:
    """What "module:name" stands for; the module is below blinkpy. Imported late, to keep the start light."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"blinkpy.{module}"), attribute)


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line. flags: of a subcommand, for guesses what a misspelled one means."""

    flags: dict[str, list[str]]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The arguments by name. Raises ConfigError."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            flags = self.flags[found.command]
            raise ConfigError(f"unknown argument {unknown[0]!r}{meant(unknown[0].partition('=')[0], flags)}")
        return vars(found)


def flag(item: dataclasses.Field[Any]) -> str:
    """How an option is spelled on the command line."""
    return "--" + item.name.replace("_", "-")


def describe(item: dataclasses.Field[Any]) -> str:
    """Help text of an option with its bounds and its default, as argparse takes it."""
    low, high = item.metadata["low"], item.metadata["high"]
    notes = []
    if low is not None:
        notes.append(f"{low} to {high}")
    if option_type(item) is bool:
        notes.append(f"default: {'on' if item.default else 'off'}")
    elif item.default != "":
        notes.append(f"default: {item.default}")
    return (help_text(item) + (f" [{'; '.join(notes)}]" if notes else "")).replace("%", "%%")


def add_option(group: argparse._ArgumentGroup, item: dataclasses.Field[Any]) -> None:
    """Add the flag of one option. An option that is not given leaves no trace, so that other sources can set it."""
    kind = option_type(item)
    how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        names = item.metadata["choices"]
        metavar = "{" + ",".join(names) + "}" if names else {int: "N", float: "X"}.get(kind, item.name.split("_")[-1].upper())
        how = {"type": kind, "metavar": metavar} | ({"action": "append"} if item.metadata["repeats"] else {})
    group.add_argument(flag(item), dest=item.name, default=argparse.SUPPRESS, help=describe(item), **how)


def make_parser() -> Parser:
    load_choices()
    parser = Parser(prog="blinkpy", description="Serve large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"blinkpy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = add_command(commands, command, "[MODEL]" if command.model else "")
        if command.model:
            sub.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
        sub.add_argument("--config", metavar="FILE", help="TOML file with options; flags win over it")
        for section, entries in groupby(options(command.name), key=itemgetter(0)):
            group = sub.add_argument_group(section, section_help(section))
            for _, item in entries:
                add_option(group, item)
    for tool in TOOLS:
        argument = tool.argument.rstrip("?*")
        shown = {"?": f"[{argument.upper()}]", "*": f"[{argument.upper()} ...]"}.get(tool.argument[-1], argument.upper())
        sub = add_command(commands, tool, shown)
        kind = tool.options()
        group = sub.add_argument_group("options", section_line(kind))
        for item in dataclasses.fields(kind):
            if item.name == argument:
                nargs: dict[str, Any] = {"nargs": tool.argument[-1], "default": item.default} if argument != tool.argument else {}
                sub.add_argument(item.name, metavar=argument.upper(), help=describe(item), **nargs)
            else:
                add_option(group, item)
    parser.flags = {name: list(sub._option_string_actions) for name, sub in commands.choices.items()}
    return parser


def add_command(commands: Any, command: Command | Tool, argument: str) -> argparse.ArgumentParser:
    """The parser of a subcommand. argument: as its usage shows the one without a flag; "" if there is none."""
    usage = " ".join(filter(None, ["blinkpy", command.name, argument, "[options]"]))
    sub: argparse.ArgumentParser = commands.add_parser(
        command.name, usage=usage, help=command.help, description=command.help + ".", allow_abbrev=False
    )
    return sub


def section_help(section: str) -> str:
    return section_line(next(f.default_factory for f in dataclasses.fields(Config) if f.name == section))


def section_line(kind: Any) -> str:
    """The first line of a dataclass's description."""
    return (kind.__doc__ or "").splitlines()[0]


def resolve(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Config, frozenset[str]]:
    """The config from the parsed arguments, the environment and the file, and the names of the options that were given.

    Raises ConfigError for anything that is unknown, misspelled or out of bounds.
    """
    values: dict[str, Any] = load_file(arguments["config"]) if arguments.get("config") else {}
    values |= {name: environment[variable] for variable, name in ENVIRONMENT.items() if environment.get(variable)}
    known = {item.name for _, item in options()}
    given = {name: value for name, value in arguments.items() if name in known}
    values |= {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    model = arguments.get("model_argument")
    if model is not None:
        if "model" in arguments and arguments["model"] != model:
            raise ConfigError(f"two models are named: {model!r} and --model {arguments['model']!r}")
        values["model"] = model
    check_asked(values)
    return Config().with_options(values), frozenset(values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without one, show the commands."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal can't show ends nothing
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(argv: Sequence[str]) -> int:
    try:
        parser = make_parser()
        if not argv:
            parser.print_help(sys.stderr)
            return 2
        arguments = parser.parse(argv)
        name = arguments.pop("command")
        return next(each for each in (*COMMANDS, *TOOLS) if each.name == name).run(arguments)
    except ConfigError as error:
        print(f"blinkpy: error: {error}", file=sys.stderr)
        return 2
