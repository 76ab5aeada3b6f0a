"""Kill or stop one of two engines under streams, again and again: `make fleet-kills KILLS=200`.

Each client must get exactly the text, log probabilities and ends of an undisturbed run (tests/support/fleet_kills.py).
"""

import argparse
import json
import random
import secrets
import signal

from support.fleet_kills import survive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64, help="at a time")
    parser.add_argument("--tokens", type=int, default=60, help="of a stream")
    parser.add_argument("--stops", action="store_true", help="SIGSTOP and SIGTERM, too, not SIGKILL alone")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    signals = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM) if options.stops else (signal.SIGKILL,)
    print(f"--seed {options.seed}", flush=True)
    print(json.dumps(survive(random.Random(options.seed), options.kills, options.streams, options.tokens, signals)))


if __name__ == "__main__":
    main()
