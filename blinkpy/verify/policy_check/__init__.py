"""`blinkpy check`: what a user's scheduling policy does, before it serves anybody."""
