"""Fields of requests: their checks, their schemas, their lines in the docs."""
