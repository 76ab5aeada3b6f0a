"""blinkpy serves large language models with the host CPU off the path of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blinkpy.llm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """The offline API is loaded on first use, so that `import blinkpy` stays light."""
    if name in __all__:
        from blinkpy import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'blinkpy' has no attribute {name!r}")
