"""`blinkpy check --fleet`: simulate a placement rule before it serves requests."""
