"""The tree of all options, from the command line, `--config FILE` or another process."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from blinkpy.config.engine_options import (
    DEFAULT_SLOTS,
    NO_HITS,
    CacheOptions,
    EngineOptions,
    ModelOptions,
    QueueOptions,
    check_engine_name,
)
from blinkpy.config.front_options import AccessOptions, FrontendOptions, TransportOptions, WatchOptions
from blinkpy.config.option_fields import COMMANDS, EXTENSIONS, ConfigError, Options, check_value
from blinkpy.config.peer_options import PEER_OPTIONS
from blinkpy.config.scheduler_options import (
    EAGLE,
    SchedulerOptions,
    check_class_sizes,
    check_drafts,
    check_step_sizes,
    check_targets,
)


@dataclass(frozen=True)
class Config:
    """The whole tree. Sections are grouped as in the documentation; option names are unique across sections."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    queue: QueueOptions = field(default_factory=QueueOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transport: TransportOptions = field(default_factory=TransportOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)
    extensions: Mapping[type, Any] = field(default_factory=dict)  # tables that differ from their defaults

    def __post_init__(self) -> None:
        values = as_table(self)
        for _, item in options():
            check_value(item, values[item.name])
        if self.model.speculative_model and self.scheduler.speculative == "off":
            object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler, speculative=EAGLE))
        check_engine_name(self.engine.name)
        for name in ("page_size", "cq_entries", "sq_entries"):
            value = values[name]
            if value & (value - 1):
                raise ConfigError(f"{name} must be a power of two, not {value}")
        if 0 < self.queue.sq_entries < self.worker_slots:
            raise ConfigError(f"sq_entries ({self.queue.sq_entries}) must be at least slots ({self.worker_slots})")
        if self.frontend.response_store_mib and self.frontend.workers > 1:
            raise ConfigError(
                f"response_store_mib needs workers 1, not {self.frontend.workers}: each worker stores only its own responses"
            )
        if 0 < self.engine.grammar_slots < self.frontend.workers:
            raise ConfigError(
                f"grammar_slots ({self.engine.grammar_slots}) must be 0 or at least workers ({self.frontend.workers})"
            )
        check_step_sizes(self.scheduler, settled=False)
        check_class_sizes(self.scheduler)
        check_targets(self.scheduler)
        check_drafts(self.scheduler)
        _check_head(self.model.speculative_model, self.scheduler.speculative)

    @property
    def worker_slots(self) -> int:
        """Maximum requests in flight of a worker. An engine whose model has large recurrent states may use fewer."""
        return self.queue.slots or DEFAULT_SLOTS

    @property
    def all_slots(self) -> int:
        """`worker_slots` of all workers of an engine together."""
        return self.frontend.workers * self.worker_slots

    def extension(self, kind: type[Options]) -> Options:
        """The options that another module added. kind: their class."""
        return self.extensions.get(kind) or kind()

    def with_options(self, values: Mapping[str, Any]) -> Self:
        """A copy with some options replaced, by flat name. Raises ConfigError for an unknown name or invalid
        value.
        """
        homes = {item.name: kind for _, kind in _kinds() for item in dataclasses.fields(kind)}
        changes: dict[type, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in homes:
                raise ConfigError(f"unknown option {name!r}{meant(name, homes)}")
            changes.setdefault(homes[name], {})[name] = value
        sections, extensions = {}, {}
        for name, kind in _kinds():
            changed = dataclasses.replace(self._part(name, kind), **changes.get(kind, {}))
            if kind not in EXTENSIONS:
                sections[name] = changed
            elif changed != kind():
                extensions[kind] = changed
        return dataclasses.replace(self, **sections, extensions=extensions)

    def _part(self, section: str, kind: type[Options]) -> Options:
        part: Options = self.extension(kind) if kind in EXTENSIONS else getattr(self, section)
        return part


def _check_head(head: str, kind: str) -> None:
    """Raise ConfigError if drafts need a head that was not given, or the other way round."""
    if head and kind != EAGLE:
        raise ConfigError(f"speculative_model needs speculative {EAGLE}, which it implies, not {kind}: set only one of them")
    if kind == EAGLE and not head:
        raise ConfigError(f"speculative {EAGLE} needs speculative_model: the folder of the model's EAGLE-3 head")


def _kinds() -> Iterator[tuple[str, Any]]:
    """(section name, class of options) of each section. Extensions follow their section."""
    for section in dataclasses.fields(Config):
        if section.name in COMMANDS:
            yield section.name, section.default_factory
            yield from ((section.name, kind) for kind, name in EXTENSIONS.items() if name == section.name)


def options(command: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section name, field) of every option, in order. command: only options with a flag of this command."""
    for section, kind in _kinds():
        for item in dataclasses.fields(kind):
            if not command or command in (item.metadata["commands"] or COMMANDS[section]).split():
                yield section, item


def check_asked(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if options that the user set, by flat name, exclude each other. A default yields to an option that was
    set.
    """
    if values.get("window_cache") == "ring" and values.get("enable_prefix_caching"):
        raise ConfigError(f"enable_prefix_caching needs window_cache full: {NO_HITS}")
    if values.get("speculative_model") and values.get("speculative") == "off":
        raise ConfigError("speculative_model has no effect with speculative off: set only one of them")
    if "response_store_count" in values and not values.get("response_store_mib"):
        raise ConfigError("response_store_count needs response_store_mib, since no response is stored without it")
    for name in ("api_key", "api_keys"):  # perhaps from an unset variable, which would disable authentication
        if values.get(name) == "":
            raise ConfigError(f"{name} is empty: leave it out if no key is needed")


def load_file(path: str | Path) -> dict[str, Any]:
    """Options of a TOML file by flat name, from the top level or from tables named like the sections.

    Raises ConfigError if the file can't be read, is not TOML, or contains an unknown section or option.
    """
    return option_values(read_toml(path), path)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError if it can't be read or is not TOML."""
    try:
        with open(path, "rb") as source:
            return tomllib.load(source)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def option_values(content: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Options by flat name, from the content of a file. Raises ConfigError for an unknown section or option."""
    home = {item.name: section for section, item in options()}
    values: dict[str, Any] = {}
    for key, value in content.items():
        # "model" is both a section and an option. A table is the section.
        entries = value.items() if key in COMMANDS and isinstance(value, dict) else ((key, value),)
        for name, entry in entries:
            if name not in home or (isinstance(value, dict) and home[name] != key):
                shown = f"{key}.{name}" if isinstance(value, dict) and name != key else name
                raise ConfigError(f"{path}: unknown option {shown!r}{meant(name, home)}")
            values[name] = entry
    return values


def meant(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, to append to a message, or "". An option of vLLM or SGLang gets advice by its name."""
    advice = PEER_OPTIONS.get(name.lstrip("-").replace("_", "-"))
    if advice is not None:
        return f": {advice}"
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def as_table(config: Config) -> Mapping[str, Any]:
    """All options by flat name, for display or for another process."""
    parts = [config._part(section, kind) for section, kind in _kinds()]
    return {item.name: getattr(part, item.name) for part in parts for item in dataclasses.fields(part)}
