"""The protocol under everything that front ends may do: see front_machine. BLINKPY_PROFILE=nightly looks longer.

Supports claim state/pages.
"""

from support.front_end.front_machine import PROFILE, FrontMachine

TestFrontEnds = FrontMachine.TestCase
TestFrontEnds.settings = PROFILE
