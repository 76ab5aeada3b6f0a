"""Whether an engine hangs."""

MOST_GAP_S = 1.0  # that counts between two looks: in a longer one who looks was stopped, and the engine perhaps with it


class BeatWatch:
    """limit_s: how long a beat may stand still, in seconds; 0: for ever."""

    def __init__(self, limit_s: float):
        self._limit_s, self._still_s = limit_s, 0.0
        self._beat: int | None = None
        self._looked = 0.0

    def is_over(self, beat: int, now: float) -> bool:
        """Look: whether the beat has stood still for longer than the limit. now: of a clock, s."""
        self._still_s = self._still_s + min(now - self._looked, MOST_GAP_S) if beat == self._beat else 0.0
        self._beat, self._looked = beat, now
        return 0 < self._limit_s < self._still_s
