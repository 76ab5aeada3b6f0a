"""Jobs in processes of their own, each with a budget of time and memory."""
