"""From a conversation to the prompt's text: the template writes special tokens, and the messages can't."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.special_tokens import SpecialTokens


def chat_text(
    template: ChatTemplate,
    specials: SpecialTokens,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a prompt, with marks where clients' texts are spelled like special tokens: Tokenizer.encode with parse_special
    takes them out. continue_final_message: it ends with the last message's text, as that is. tools, variables: as of
    ChatTemplate.render. Raises ChatError."""
    marked = specials.mark([dict(message) for message in messages])
    if continue_final_message:
        last, key = marked[-1], "content"
        if isinstance(last[key], list) and last[key]:
            last, key = last[key][-1], "text"
        last[key] = f"{last[key] or ''}{specials.end_mark}"
    generation = add_generation_prompt and not continue_final_message
    values = {name: specials.mark(value) for name, value in variables.items()}
    text = template.render(marked, generation, specials.mark(list(tools)) if tools else None, values)
    if continue_final_message:
        text, found, _ = text.rpartition(specials.end_mark)
        if not found:
            raise ChatError("the chat template does not mark the end of the last message, so the message can't be continued")
    return text
