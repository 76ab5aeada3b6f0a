"""Jobs in separate processes, each with a budget of time and memory."""
