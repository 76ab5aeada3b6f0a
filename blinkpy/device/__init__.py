"""One source, three executions: the portable language, argument tables, and caches of compiled code."""
