"""Time limits for slow machines, and the profile of this run."""

import os

NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
TEST_S = 2400.0  # of a test. Conditions inside have shorter limits; this limit names the test before the machine is ended
ATTACH_S = 60.0  # until an engine of the same process grants a front end its pair
HANDSHAKE_S = 8.0
