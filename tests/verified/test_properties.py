"""The protocol under all permitted actions of front ends: see front_machine. BLINKPY_PROFILE=nightly searches longer.

Supports claim state/pages.

Tester [state machine](#the-state-machine): scheduler and the real client, in plain Python | 120 fresh examples of 50 rules
"""

from support.front_end.front_machine import PROFILE, FrontMachine

TestFrontEnds = FrontMachine.TestCase
TestFrontEnds.settings = PROFILE
