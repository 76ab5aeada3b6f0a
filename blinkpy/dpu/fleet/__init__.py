"""Several engines behind one front end."""
