"""`blinkpy check`: test a user's scheduling policy before it serves requests."""
