"""The output items of /v1/responses: messages, reasoning and calls, each with the events that begin, fill and end it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
DELTAS = {
    MESSAGE: "response.output_text.delta",
    REASONING: "response.reasoning_text.delta",
    CALL: "response.function_call_arguments.delta",
}
Event = tuple[str, dict[str, Any]]  # its type and its content


@dataclass
class Item:
    """One item. index: its place in the output. name, call_id, namespace: of a call. logprobs: of the text of a message."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    namespace: str = ""
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """What its events have in common."""
        where = {"item_id": self.id, "output_index": self.index}
        return where if self.kind == CALL else {**where, "content_index": 0}

    def _part(self, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def table(self) -> dict[str, Any]:
        """The item as it is by now; one that has not ended has no text."""
        text = "" if self.status == "in_progress" else "".join(self.texts)
        head = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == CALL:
            inside = {"namespace": self.namespace} if self.namespace else {}
            return {**head, "call_id": self.call_id, **inside, "name": self.name, "arguments": text}
        parts = [] if self.status == "in_progress" else [self._part(text, self.logprobs)]
        return (
            {**head, "summary": [], "content": parts}
            if self.kind == REASONING
            else {**head, "role": "assistant", "content": parts}
        )

    def begin(self) -> list[Event]:
        added: Event = ("response.output_item.added", {"output_index": self.index, "item": self.table()})
        if self.kind == CALL:
            return [added]
        return [added, ("response.content_part.added", {**self.place, "part": self._part("", ())})]

    def end(self, status: str) -> list[Event]:
        """No more text follows."""
        self.status, text = status, "".join(self.texts)
        done: Event = ("response.output_item.done", {"output_index": self.index, "item": self.table()})
        whole = DELTAS[self.kind].replace(".delta", ".done")
        if self.kind == CALL:
            return [(whole, {**self.place, "name": self.name, "arguments": text}), done]
        texts = {"text": text} if self.kind == REASONING else {"text": text, "logprobs": self.logprobs}
        return [
            (whole, {**self.place, **texts}),
            ("response.content_part.done", {**self.place, "part": self._part(text, self.logprobs)}),
            done,
        ]
