"""What a client's grammar can be refused for."""

from collections.abc import Sequence


class GrammarError(ValueError):
    """The grammar can't be used; the message is for the client.

    path: where in the grammar, as a JSON pointer behind '#'; keyword: the one at fault, "" for none. part: of a grammar made of
    several fields, which of them is wrong, and the name of the tool that it belongs to. limit: the option that it went beyond, if
    any.
    """

    limit: str | None = None

    def __init__(self, message: str, path: str = "#", keyword: str = "", part: Sequence[str] | None = None):
        super().__init__(message)
        self.message, self.path, self.keyword, self.part = message, path, keyword, part

    def told(self, param: str) -> tuple[str, str]:
        """The field at fault, and the message with it. param: the field of the whole grammar."""
        place = "" if self.path == "#" else f" At {self.path}."
        if self.part is None:
            return param, f"'{param}': {self.message}{place}"
        field, name = self.part
        return field, f"'{field}' of '{name}': {self.message}{place}"


class GrammarTooLargeError(GrammarError):
    """The grammar needs more states than an automaton may have."""


class GrammarTooSlowError(GrammarTooLargeError):
    """The grammar takes more time to compile than there is for one."""

    limit = "grammar_compile_ms"


class GrammarTooHeavyError(GrammarTooLargeError):
    """The grammar takes more memory to compile than there is for one."""

    limit = "grammar_compile_mib"
