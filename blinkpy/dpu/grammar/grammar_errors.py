"""What a client's grammar can be refused for."""


class GrammarError(ValueError):
    """The grammar can't be used; the message is for the client.

    path: where in the grammar, as a JSON pointer behind '#'; keyword: the one at fault, "" for none. limit: the option that it
    went beyond, if any.
    """

    limit: str | None = None

    def __init__(self, message: str, path: str = "#", keyword: str = ""):
        super().__init__(message)
        self.message, self.path, self.keyword = message, path, keyword


class GrammarTooLargeError(GrammarError):
    """The grammar needs more states than an automaton may have."""


class GrammarTooSlowError(GrammarTooLargeError):
    """The grammar takes more time to compile than there is for one."""

    limit = "grammar_compile_ms"


class GrammarTooHeavyError(GrammarTooLargeError):
    """The grammar takes more memory to compile than there is for one."""

    limit = "grammar_compile_mib"
