"""The CUDA runtime, from the host: graphs, cubins, memory."""

from typing import Any


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed. code: cudaError_t."""

    def __init__(self, code: int, name: str, what: str):
        super().__init__(f"{what}: {name} ({code})")
        self.code = code


def check_cuda(result: tuple[Any, ...], what: str = "CUDA call") -> Any:
    """The values of a call without its status: None, one value, or a tuple. Raises CudaError if the status is
    an error.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaError(int(status), str(getattr(status, "name", status)), what)
    return values[0] if len(values) == 1 else tuple(values) or None
