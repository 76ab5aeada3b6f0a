"""`python -m blinkpy` is the command `blinkpy`."""

import sys

from blinkpy.cli import main

if __name__ == "__main__":
    sys.exit(main())
