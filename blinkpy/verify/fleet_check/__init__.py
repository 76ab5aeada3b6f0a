"""`blinkpy check --fleet`: what a placement does, before it serves anybody."""
