"""What can be wrong with a recording, for the user."""

from __future__ import annotations

from blinkpy.config import ConfigError


class RecordingError(ConfigError):
    """There is no recording, or none that can be used."""
