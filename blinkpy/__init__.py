"""blinkpy serves large language models with the host CPU off the path of every token."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blinkpy.version import __version__

if TYPE_CHECKING:
    from blinkpy.llm import LLM
    from blinkpy.outputs import CompletionOutput, RequestOutput
    from blinkpy.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {"LLM": "llm", "CompletionOutput": "outputs", "RequestOutput": "outputs", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """The offline API is loaded on first use, so that `import blinkpy` stays light."""
    if name in _HOMES:
        return getattr(import_module(f"blinkpy.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'blinkpy' has no attribute {name!r}")
