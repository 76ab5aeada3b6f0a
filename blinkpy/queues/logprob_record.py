"""The log probability record: stored beside a completion whose request asked for log probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOP_LOGPROBS = 20
RECORD_PAIRS = 1 + TOP_LOGPROBS  # the sampled token, then the most likely ones in descending order
RECORD_PAIR = np.dtype([("token", "<i4"), ("logprob", "<f4")])  # token -1: there are no more tokens of finite logit
RECORD_BYTES = RECORD_PAIRS * RECORD_PAIR.itemsize
# Device code and steps take a pair for one int64 word.
NO_RECORD_PAIR = int(np.array((-1, -np.inf), RECORD_PAIR).view(np.int64))

Records = NDArray[np.void]  # [n, RECORD_PAIRS] of RECORD_PAIR
