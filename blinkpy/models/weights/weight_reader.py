"""Bytes of weight files, with errors that name the file and the tensor."""

import os
from io import FileIO
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.model_files import open_file


def open_weights(path: Path) -> FileIO:
    """The file, for read_into. Raises ConfigError."""
    return open_file(path.parent, path.name)


def read_into(memory: memoryview, file: FileIO, offset: int, name: str) -> None:
    """Fill memory, bytes, with what is in the file from `offset` on. name: of the tensor. Raises ConfigError if
    the file ends before, or can't be read.
    """
    while memory:
        try:
            read = os.preadv(file.fileno(), [memory], offset)
        except OSError as error:
            raise ConfigError(f"can't read {name} from {file.name}: {error.strerror}") from error
        if read == 0:
            raise ConfigError(f"{file.name} was truncated while being read: {name} lacks at least {len(memory)} bytes")
        memory, offset = memory[read:], offset + read
