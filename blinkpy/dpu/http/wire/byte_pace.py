"""A pace for bytes that many connections bring: what comes beyond it waits, so that no turn of the event loop is long."""


class BytePace:
    """A virtual clock of what was taken. per_second: bytes; burst: bytes that may come at once, after a rest."""

    def __init__(self, per_second: float, burst: float):
        self._second, self._burst_s = per_second, burst / per_second
        self._free = 0.0  # when all that was taken would be through, s

    def wait_s(self, size: int, now: float) -> float:
        """Seconds that whoever took this number of bytes is to wait before it takes more. now: of any clock that goes forward."""
        self._free = max(self._free, now) + size / self._second
        return max(0.0, self._free - now - self._burst_s)
