"""Responses and their conversations, in a worker's memory: bounded, and off by default."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.api_errors import ApiError

CONVERSATION_BYTES = 1 << 20  # of one conversation, and of one response, as JSON: longer ones are not kept
ENTRY_BYTES = 512  # of its objects


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a request, with the conversation before it.

    items: input items as JSON, separated by commas.
    stored: whether the response will be kept.
    """

    tenant: str
    previous: str | None
    items: bytes
    stored: bool


class Kept(NamedTuple):
    """A stored response.

    items: the conversation's items as JSON, separated by commas: the input, then the output.
    of_input: bytes of the input in `items`.
    response: the object that the client got, as JSON.
    """

    items: bytes
    of_input: int
    response: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.items) + len(self.response) + ENTRY_BYTES


class ResponseStore:
    """The responses of each tenant by id, each with the conversation that ended with it.

    most_bytes: limit for all conversations. Beyond it, the tenant with the most bytes loses its least recently used conversation.
    most_count: conversations of a tenant. Beyond it, the tenant loses its least recently used conversation.
    """

    def __init__(self, most_bytes: int, most_count: int) -> None:
        self._most_bytes, self._most_count = most_bytes, most_count
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by tenant and id
        self._sizes: dict[str, int] = {}  # bytes of each tenant
        self.bytes = 0

    def resolve(self, body: bytearray, tenant: str) -> Conversation | None:
        """Replace the id of the previous conversation in a request's body by its items. None for a body that is refused later, or
        is too long to be kept. Raises ApiError for an unknown id, and for one in a body that is too long."""
        if len(body) > CONVERSATION_BYTES:
            if b'"previous_response_id"' in body:
                limit = f"at most {CONVERSATION_BYTES} bytes"
                message = f"A request with previous_response_id may have {limit}: send the whole conversation instead."
                raise ApiError(400, message, param="previous_response_id", code="request_too_large")
            return None
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if type(fields) is not dict:
            return None
        previous, store, given = (fields.get(name) for name in ("previous_response_id", "store", "input"))
        items = [{"role": "user", "content": given}] if type(given) is str else given
        if type(items) is not list or not items or store not in (None, True, False) or type(previous) not in (str, type(None)):
            return None
        before = b"" if previous is None else self._items(previous, tenant)
        whole = b",".join(filter(None, (before, orjson.dumps(items)[1:-1])))
        del fields["input"]
        fields.pop("previous_response_id", None)
        fields["store"] = False
        body[:] = b'%b,"input":[%b]}' % (orjson.dumps(fields)[:-1], whole)
        return Conversation(tenant, previous, whole, store is not False and len(whole) <= CONVERSATION_BYTES)

    def keep(self, conversation: Conversation, response: dict[str, Any]) -> None:
        """Keep a response, and the conversation with its output."""
        output, tenant = orjson.dumps(response["output"])[1:-1], conversation.tenant
        items = b",".join(filter(None, (conversation.items, output)))
        kept = Kept(items, len(conversation.items), orjson.dumps(response))
        if max(len(items), len(kept.response)) > CONVERSATION_BYTES:
            return
        self.delete(response["id"], tenant)
        self._kept.setdefault(tenant, OrderedDict())[response["id"]] = kept
        self._count(tenant, kept.size)
        if len(self._kept[tenant]) > self._most_count:
            self.delete(next(iter(self._kept[tenant])), tenant)
        while self.bytes > self._most_bytes:
            most = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(next(iter(self._kept[most])), most)

    def find(self, response_id: str, tenant: str) -> Kept | None:
        """A tenant's response, which becomes its most recently used response."""
        kept = self._kept.get(tenant, OrderedDict())
        if response_id in kept:
            kept.move_to_end(response_id)
        return kept.get(response_id)

    def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response, if it exists."""
        kept = self._kept.get(tenant, OrderedDict()).pop(response_id, None)
        if kept is not None:
            self._count(tenant, -kept.size)

    def _items(self, response_id: str, tenant: str) -> bytes:
        kept = self.find(response_id, tenant)
        if kept is None:
            message = f"There is no stored response '{response_id[:200]}': send the whole conversation."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return kept.items

    def _count(self, tenant: str, size: int) -> None:
        self.bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        if not self._sizes[tenant]:
            del self._sizes[tenant], self._kept[tenant]
