"""blinkpy serves large language models with the host CPU off the path of every token."""

__version__ = "0.1.0"
