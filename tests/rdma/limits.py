"""Time limits for slow machines, and the profile of this run."""

import os

NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
TEST_S = 2400.0  # of a test. Conditions inside have their own; this one says which test it was before the machine is ended
ATTACH_S = 60.0  # of a front end, until an engine of the same process has granted its pair
HANDSHAKE_S = 8.0
