"""Errors of kernels that do not compile or fit the GPU, as text for the user: layer, shape and
configuration.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from blinkpy.config import ConfigError

logger = logging.getLogger("blinkpy.engine")
COMPILER_ERRORS = (CompilationError, OutOfResources, PTXASError)


@contextmanager
def compiler_errors(what: str) -> Iterator[None]:
    """Convert an error of Triton or the assembler to a ConfigError.

    what: the step, for the message.
    The error's notes name layer and configuration; the compiler's text is logged at DEBUG.
    """
    try:
        yield
    except COMPILER_ERRORS as error:
        logger.debug("the compiler's words:", exc_info=error)
        raise ConfigError(explained(error, what)) from None


def explained(error: Exception, what: str) -> str:
    """The error as one line for the user."""
    where = ", ".join([*reversed(getattr(error, "__notes__", [])), what])
    if isinstance(error, OutOfResources):
        why = f"does not fit this GPU: {error.required} of {error.name} needed, {error.limit} there are"
    else:
        why = f"does not compile ({type(error).__name__})"
    return (
        f"a kernel {why}: {where}. This is a fault of blinkpy: report this line with the output of `blinkpy doctor`. "
        "--batch-invariant uses other configurations, and --device cpu none of these kernels"
    )
