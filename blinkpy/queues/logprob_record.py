"""The log probability record: stored beside a completion whose request asked for log probabilities."""

import numpy as np
from numpy.typing import NDArray

TOP_LOGPROBS = 20
LOGPROB_ENTRIES = 1 + TOP_LOGPROBS  # the sampled token, then the most likely ones in descending order
LOGPROB_ENTRY = np.dtype([("token", "<i4"), ("logprob", "<f4")])  # token -1: there are no more tokens of finite logit
RECORD_BYTES = LOGPROB_ENTRIES * LOGPROB_ENTRY.itemsize
# Device code and steps take a pair for one int64 word.
NO_LOGPROB_ENTRY = int(np.array((-1, -np.inf), LOGPROB_ENTRY).view(np.int64))

Records = NDArray[np.void]  # [n, LOGPROB_ENTRIES] of LOGPROB_ENTRY
