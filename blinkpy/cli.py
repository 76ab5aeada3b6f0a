"""The command `blinkpy`: its options are generated from the dataclasses of `blinkpy.config`.

An option's value comes from the first of these that gives one: a flag, an environment variable (ENVIRONMENT), the file
named by --config, the default. Errors are one line. Exit codes: 0 fine, 1 a failure at run time, 2 wrong usage or options.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from blinkpy.config import Config, ConfigError, load_file, option_type, options
from blinkpy.version import __version__

ENVIRONMENT = {"BLINKPY_API_KEY": "api_key"}

# Options of a half; `serve` has those of both, without the ways to connect them.
ENGINE_SECTIONS = ("model", "cache", "scheduler", "queue", "engine", "transport")
FRONTEND_SECTIONS = ("frontend", "transport")
ENGINE_EXTRA = frozenset({"workers", "shutdown_s"})  # one queue pair for each worker; how long a drain may take
ENGINE_WITHOUT = frozenset({"served_model_name", "chat_template", "engine_timeout_ms", "engine"})
FRONTEND_WITHOUT = frozenset({"listen", "queue_memory"})
DOCTOR_OPTIONS = frozenset({"rdma_device", "rdma_gid_index"})
FRONTEND_EXTRA = frozenset({"model", "served_model_name", "chat_template", "name", "engine_timeout_ms"})

METAVARS: dict[type, str] = {int: "N", float: "X"}

Item = tuple[str, dataclasses.Field[Any]]


def serve_options() -> list[Item]:
    return [(section, item) for section, item in options() if section != "transport"]


def engine_options() -> list[Item]:
    return [
        (section, item)
        for section, item in options()
        if (section in ENGINE_SECTIONS and item.name not in ENGINE_WITHOUT) or item.name in ENGINE_EXTRA
    ]


def frontend_options() -> list[Item]:
    return [
        (section, item)
        for section, item in options()
        if (section in FRONTEND_SECTIONS and item.name not in FRONTEND_WITHOUT) or item.name in FRONTEND_EXTRA
    ]


def doctor_options() -> list[Item]:
    return [(section, item) for section, item in options() if item.name in DOCTOR_OPTIONS]


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand. run gets the config and the names of the options that somebody gave; it returns the exit code.
    model: whether it is about one."""

    name: str
    help: str
    options: Callable[[], list[Item]]
    run: Callable[[Config, frozenset[str]], int]
    model: bool = True


def run_serve(config: Config, given: frozenset[str]) -> int:
    from blinkpy.serving.serve import serve

    return serve(config, named="name" in given)


def run_engine(config: Config, given: frozenset[str]) -> int:
    from blinkpy.serving.engine_process import engine_alone

    return engine_alone(config, given)


def run_frontend(config: Config, given: frozenset[str]) -> int:
    from blinkpy.serving.frontend_process import frontend_alone

    return frontend_alone(config, given)


def run_doctor(config: Config, given: frozenset[str]) -> int:
    from blinkpy.doctor import doctor

    return doctor(config)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A subcommand that serves nobody, with a dataclass of options of its own.

    load: that class; called late, to keep the start light. argument: its field that is given without a flag, "?" after it if
    it may be missing. run gets the class's instance and returns the exit code.
    """

    name: str
    help: str
    argument: str
    load: Callable[[], type]
    run: Callable[[Any], int]


def check_options() -> type:
    from blinkpy.verify.policy_check.check_options import CheckOptions

    return CheckOptions


def run_check(options: Any) -> int:
    from blinkpy.verify.policy_check.check_command import run_check

    return run_check(options)


def record_options() -> type:
    from blinkpy.verify.replay.replay_options import RecordOptions

    return RecordOptions


def run_record(options: Any) -> int:
    from blinkpy.verify.replay.replay_command import run_record

    return run_record(options)


def replay_options() -> type:
    from blinkpy.verify.replay.replay_options import ReplayOptions

    return ReplayOptions


def run_replay(options: Any) -> int:
    from blinkpy.verify.replay.replay_command import run_replay

    return run_replay(options)


TOOLS = (
    Tool("check", "check a scheduling policy and compare it with the shipped ones", "policy", check_options, run_check),
    Tool("record", "save the last steps of a running engine", "name?", record_options, run_record),
    Tool("replay", "run saved steps again, and tell what happened and why", "file", replay_options, run_replay),
)

COMMANDS = (
    Command("serve", "serve a model over HTTP: starts an engine and front ends", serve_options, run_serve),
    Command("engine", "start an engine alone; front ends attach to it by --name, or over RDMA", engine_options, run_engine),
    Command("frontend", "start front ends alone, for an engine of this --name, or over RDMA", frontend_options, run_frontend),
    Command("doctor", "look whether this machine is ready for --transport rdma", doctor_options, run_doctor, model=False),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def flag(item: dataclasses.Field[Any]) -> str:
    """How an option is spelled on the command line."""
    return "--" + item.name.replace("_", "-")


def describe(item: dataclasses.Field[Any]) -> str:
    """Help text of an option with its bounds and its default."""
    low, high = item.metadata["low"], item.metadata["high"]
    notes = []
    if low is not None:
        notes.append(f"{low} to {high}")
    if option_type(item) is bool:
        notes.append(f"default: {'on' if item.default else 'off'}")
    elif item.default != "":
        notes.append(f"default: {item.default}")
    return str(item.metadata["help"]) + (f" [{'; '.join(notes)}]" if notes else "")


def add_option(group: argparse._ArgumentGroup, item: dataclasses.Field[Any]) -> None:
    """Add the flag of one option. An option that is not given leaves no trace, so that other sources can set it."""
    kind = option_type(item)
    kwargs: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": describe(item).replace("%", "%%")}
    if kind is bool:
        group.add_argument(flag(item), action=argparse.BooleanOptionalAction, **kwargs)
    else:
        names = item.metadata["choices"]
        metavar = "{" + ",".join(names) + "}" if names else METAVARS.get(kind, item.name.split("_")[-1].upper())
        group.add_argument(flag(item), type=kind, metavar=metavar, **kwargs)


def make_parser() -> Parser:
    parser = Parser(prog="blinkpy", description="Serve large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"blinkpy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        usage = f"blinkpy {command.name} {'[MODEL] ' if command.model else ''}[options]"
        sub = commands.add_parser(
            command.name, usage=usage, help=command.help, description=command.help + ".", allow_abbrev=False
        )
        if command.model:
            sub.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
        sub.add_argument("--config", metavar="FILE", help="TOML file with options; flags win over it")
        groups: dict[str, argparse._ArgumentGroup] = {}
        for section, item in command.options():
            if section not in groups:
                groups[section] = sub.add_argument_group(section, section_help(section))
            add_option(groups[section], item)
    for tool in TOOLS:
        argument = tool.argument.removesuffix("?")
        optional = argument != tool.argument
        metavar = f"[{argument.upper()}]" if optional else argument.upper()
        usage = f"blinkpy {tool.name} {metavar} [options]"
        sub = commands.add_parser(tool.name, usage=usage, help=tool.help, description=tool.help + ".", allow_abbrev=False)
        kind = tool.load()
        group = sub.add_argument_group("options", section_line(kind))
        for item in dataclasses.fields(kind):
            if item.name == argument:
                nargs: dict[str, Any] = {"nargs": "?", "default": item.default} if optional else {}
                sub.add_argument(item.name, metavar=argument.upper(), help=describe(item).replace("%", "%%"), **nargs)
            else:
                add_option(group, item)
    return parser


def section_help(section: str) -> str:
    """What a section of the config is about, in one line."""
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
    values |= {name: value for name, value in arguments.items() if name in known}
    model = arguments.get("model_argument")
    if model is not None:
        if "model" in arguments and arguments["model"] != model:
            raise ConfigError(f"two models are named: {model!r} and --model {arguments['model']!r}")
        values["model"] = model
    return Config().with_options(values), frozenset(values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = vars(make_parser().parse_args(argv))
        for tool in TOOLS:
            if arguments["command"] == tool.name:
                del arguments["command"]
                return tool.run(tool.load()(**arguments))
        command = next(c for c in COMMANDS if c.name == arguments["command"])
        config, given = resolve(arguments, os.environ)
        return command.run(config, given)
    except ConfigError as error:
        print(f"blinkpy: error: {error}", file=sys.stderr)
        return 2
