"""The policy of a recording: how a file names it, and how a replay finds it again."""

import hashlib
import sys
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.scheduler.policies import SHIPPED, Policy
from blinkpy.verify.policy_check.guard import vetted_policy


def policy_facts(name: str, policy: Policy) -> dict[str, str]:
    """What a recording says about its policy: the name, and a digest of the file it came from."""
    digest = ""
    if name not in SHIPPED:
        digest = hashlib.sha256(Path(policy.__code__.co_filename).read_bytes()).hexdigest()
    return {"policy": name, "policy_digest": digest}


def recorded_policy(about: dict[str, Any], given: str) -> Policy:
    """The policy of a recording with this description. given: what --policy said, or "".

    A user's own is not in the file: code in a recording would run on the code that opens it. Raises ConfigError
    if the two don't fit.
    """
    name = str(about.get("policy", ""))
    if name in SHIPPED:
        if given not in ("", name):
            raise ConfigError(f"the recording was made with the policy {name}, not {given}")
        return SHIPPED[name]
    if not given:
        raise ConfigError(f"the recording was made with the policy {name}: give it with --policy FILE.py:FUNCTION")
    policy = vetted_policy(given)
    if policy_facts(given, policy)["policy_digest"] != about.get("policy_digest"):
        print(f"blinkpy: {given} is not the file that the engine had: it may decide differently", file=sys.stderr)
    return policy
