"""The file of --engines-file: the engines of a front end, which come and go while it runs.

It is looked at twice a second. Whoever writes it replaces it in one step, by a rename; a list that is half written is followed as
far as it goes, and the rest comes with the next look.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.fleet.engine_list import engine_configs
from blinkpy.dpu.fleet.engine_places import EngineEntry
from blinkpy.dpu.fleet.fleet_options import FleetOptions

LOOK_S = 0.5

logger = logging.getLogger("blinkpy.frontend")

Entry = Callable[[str, Config], EngineEntry]  # of a label and the config of its link


class EnginesFile:
    """config: of the front end, which names the file. entries: the engines as of the last look at which the file was right.
    Raises ConfigError."""

    def __init__(self, config: Config, entry: Entry):
        self._config, self._entry = config, entry
        self._path = Path(config.extension(FleetOptions).engines_file)
        self._seen = self._signature()
        self.entries = self._read()

    def look(self) -> Sequence[EngineEntry]:
        """The engines now. What is wrong with a new list is logged, and the old one stays."""
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen
            try:
                self.entries = self._read()
                logger.info("%s: %d engines", self._path, len(self.entries))
            except ConfigError as error:
                logger.error("%s; the engines stay as they were", error)
        return self.entries

    async def watch(self, take: Callable[[Sequence[EngineEntry]], None]) -> None:
        """Hand the engines over, again and again, also where nothing is new."""
        while True:
            await asyncio.sleep(LOOK_S)
            take(await asyncio.to_thread(self.look))

    def _read(self) -> list[EngineEntry]:
        return [self._entry(label, config) for label, config in engine_configs(self._config).items()]

    def _signature(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size
