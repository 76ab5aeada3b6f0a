"""One source, three executions: the portable language, argument tables, caches of compiled code."""
