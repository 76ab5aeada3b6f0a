"""`blinkpy top`: live metrics of servers, in a terminal."""
