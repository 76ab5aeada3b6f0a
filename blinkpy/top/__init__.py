"""`blinkpy top`: servers at a glance, in a terminal."""
