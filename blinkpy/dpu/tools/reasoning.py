"""Reasoning: the text between two tags before a model's answer. A template may have opened it at the end of the prompt."""

from typing import NamedTuple

from blinkpy.config import REASONING_PARSERS, ConfigError
from blinkpy.dpu.tools.output_source import Content, OutputSource, Steps


class ReasoningTags(NamedTuple):
    """The tags around a model's reasoning."""

    open: str
    close: str


PARSERS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>"),
}
REASONING_PARSERS.update({"auto": "detected from the chat template", "none": "no reasoning"})
REASONING_PARSERS.update({name: f"{tags.open}...{tags.close}" for name, tags in PARSERS.items()})


def choose_tags(option: str, template: str) -> ReasoningTags | None:
    """The tags of a model; None if it does not reason.

    option: --reasoning-parser; template: source of the chat template. Raises ConfigError for an unknown option.
    """
    if option == "none":
        return None
    if option == "auto":
        return next((tags for tags in PARSERS.values() if tags.open in template or tags.close in template), None)
    if option not in PARSERS:
        raise ConfigError(f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, not {option!r}")
    return PARSERS[option]


def parse_reasoning(source: OutputSource, tags: ReasoningTags, inside: bool) -> Steps[None]:
    """Parse reasoning at the start, if any. inside: the prompt ended with the opening tag."""
    opened = yield from source.skip(tags.open)
    if opened or inside:
        source.begin_reasoning()
        yield from source.content_until((tags.close,))
        source.commit()
        source.kind = Content
