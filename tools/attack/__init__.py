"""`make attack`: random attacks on a front end, measured by a client that behaves."""
