"""`make attack`: random attacks on a front end, and what they do to a client that behaves."""
