"""Errors of a client's grammar."""

from collections.abc import Sequence


class GrammarError(ValueError):
    """The grammar can't be used; the message is for the client.

    path: its place in the grammar, as a JSON pointer after '#'.
    keyword: the keyword at fault, "" for other errors.
    part: the wrong field of a grammar made of several fields, and the name of its tool.
    limit: the exceeded option, if any.
    """

    limit: str | None = None

    def __init__(self, message: str, path: str = "#", keyword: str = "", part: Sequence[str] | None = None):
        super().__init__(message)
        self.message, self.path, self.keyword, self.part = message, path, keyword, part

    def with_param(self, param: str) -> tuple[str, str]:
        """The field at fault, and the message that names it. param: the field of the whole grammar."""
        place = "" if self.path == "#" else f" At {self.path}."
        if self.part is None:
            return param, f"'{param}': {self.message}{place}"
        field, name = self.part
        return field, f"'{field}' of '{name}': {self.message}{place}"


class GrammarTooLargeError(GrammarError):
    """The grammar exceeds the limit of states."""


class GrammarTooSlowError(GrammarTooLargeError):
    """The grammar exceeds the CPU time limit of a compile."""

    limit = "grammar_compile_ms"


class GrammarTooHeavyError(GrammarTooLargeError):
    """The grammar exceeds the memory limit of a compile."""

    limit = "grammar_compile_mib"
