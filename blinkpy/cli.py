"""The command `blinkpy`: its options are generated from the dataclasses of `blinkpy.config`.

The first source that sets an option wins: its flag, an environment variable (ENVIRONMENT), the file of --config, its
default. Errors are one line. Exit codes: 0 success, 1 a failure at run time, 2 wrong usage or options.
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
from blinkpy.processes import collect_rarely, open_standard_descriptors
from blinkpy.serving import load_choices
from blinkpy.version import __version__

ENVIRONMENT = {"BLINKPY_API_KEY": "api_key"}


class Command(NamedTuple):
    """A subcommand whose options are those of blinkpy.config."""

    name: str
    help: str
    function: str  # "module:function" below blinkpy: (config, names of the given options) -> exit code
    model: bool = True  # whether it takes a model

    def run(self, arguments: Mapping[str, Any]) -> int:
        return int(loaded(self.function)(*resolve(arguments, os.environ)))


class Tool(NamedTuple):
    """A subcommand with its own dataclass of options.

    Its class NameOptions is in blinkpy.tool_options. The function run_NAME of its module takes an instance of that class,
    and returns the exit code.
    """

    name: str
    help: str
    argument: str  # the field of its positional argument; a "?" at the end: optional; a "*": any number
    module: str  # below blinkpy

    def options(self) -> type:
        kind: type = loaded(f"tool_options:{self.name.title().replace('-', '')}Options")
        return kind

    def run(self, arguments: Mapping[str, Any]) -> int:
        values = {name: " ".join(value) if isinstance(value, list) else value for name, value in arguments.items()}
        return int(loaded(f"{self.module}:run_{self.name.replace('-', '_')}")(self.options()(**values)))


ENGINE = "start only an engine; front ends connect to it by --name, or over RDMA"
FRONT_END = "start only front ends, for a running engine with the same --name, or over RDMA"
COMMANDS = (
    Command("serve", "serve a model over HTTP; starts an engine and front ends", "serving.serve:serve"),
    Command("engine", ENGINE, "serving.engine_process:engine_alone"),
    Command("frontend", FRONT_END, "serving.frontend_process:frontend_alone"),
    Command("doctor", "check whether this machine is ready for --transport rdma", "doctor:doctor", model=False),
)
MODEL_HELP = "check whether a model can be served, and how much memory it needs, without loading its weights"
CHECK, REPLAY = "verify.policy_check.check_command", "verify.replay.replay_command"
TOOLS = (
    Tool("check-model", MODEL_HELP, "model", "serving.check_model"),
    Tool("check", "check a scheduling policy or a placement rule, and compare it with the shipped ones", "policy?", CHECK),
    Tool("record", "save the recording of a running engine: its last steps", "name?", REPLAY),
    Tool("replay", "run a recording again, and explain what happened and why", "file", REPLAY),
    Tool("ray", "start, watch and scale engines and front ends in a Ray cluster", "action*", "ray_fleet.fleet_keeper"),
    Tool("top", "watch running servers in a terminal", "servers*", "top.top_command"),
)


def loaded(name: str) -> Any:
    """The object "module:name" below blinkpy. Imported only when needed, so that the command starts fast."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"blinkpy.{module}"), attribute)


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong arguments, instead of printing the usage and exiting."""

    flags: dict[str, list[str]]  # the flags of each subcommand, to suggest the right spelling

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
    """An option's flag on the command line."""
    return "--" + item.name.replace("_", "-")


def describe(item: dataclasses.Field[Any]) -> str:
    """An option's help text with its bounds and default, for argparse."""
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
    """Add the flag of one option. If the flag is absent, the namespace has no entry, so other sources can set it."""
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
        sub.add_argument("--config", metavar="FILE", help="TOML file with options; flags override it")
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
    """The parser of a subcommand. argument: its positional argument as shown in the usage line, or ""."""
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
    """(config, names of the options that were given), from arguments, environment and the file of --config.

    Raises ConfigError for an unknown option or a value out of range.
    """
    values: dict[str, Any] = load_file(arguments["config"]) if arguments.get("config") else {}
    values |= {name: environment[variable] for variable, name in ENVIRONMENT.items() if environment.get(variable)}
    known = {item.name for _, item in options()}
    given = {name: value for name, value in arguments.items() if name in known}
    values |= {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    model = arguments.get("model_argument")
    if model is not None:
        if "model" in arguments and arguments["model"] != model:
            raise ConfigError(f"two models given: {model!r} and --model {arguments['model']!r}; name only one")
        values["model"] = model
    check_asked(values)
    return Config().with_options(values), frozenset(values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without a command, show the list of commands."""
    open_standard_descriptors()
    collect_rarely()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # print names that the terminal can't encode
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # for example, `| head` closed the pipe
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
