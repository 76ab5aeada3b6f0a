"""Conversations of /v1/responses for `previous_response_id`, in a worker's memory: bounded, and off by default."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError

CONVERSATION_BYTES = 1 << 20  # of one conversation as JSON: a longer one is not kept
ENTRY_BYTES = 512  # of its objects


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a request, with the conversation before it.

    items: input items as JSON, separated by commas.
    stored: the response will be kept.
    """

    tenant: str
    previous: str | None
    items: bytes
    stored: bool


class ResponseStore:
    """The conversations that ended with a response, by the response's id, of each tenant.

    most_bytes: of all conversations. Beyond it, the tenant with the most bytes loses its least recently used conversation.
    most_count: conversations of a tenant. Beyond it, the tenant loses its least recently used conversation.
    """

    def __init__(self, most_bytes: int, most_count: int) -> None:
        self._most_bytes, self._most_count = most_bytes, most_count
        self._kept: dict[str, OrderedDict[str, bytes]] = {}  # by tenant and id
        self._sizes: dict[str, int] = {}  # bytes of each tenant
        self.bytes = 0

    def resolve(self, body: bytearray, tenant: str) -> Conversation | None:
        """Replace the id of the previous conversation in a request's body by its items. None for a body that is refused later, or
        is too long to be kept. Raises ApiError for an unknown id, and for one in a body that is too long."""
        if len(body) > CONVERSATION_BYTES:
            if b'"previous_response_id"' in body:
                limit = f"at most {CONVERSATION_BYTES} bytes"
                message = f"A request with previous_response_id may have {limit}: send the conversation without it."
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
        before = b"" if previous is None else self._get(previous, tenant)
        whole = b",".join(filter(None, (before, orjson.dumps(items)[1:-1])))
        del fields["input"]
        fields.pop("previous_response_id", None)
        fields["store"] = False
        body[:] = b'%b,"input":[%b]}' % (orjson.dumps(fields)[:-1], whole)
        return Conversation(tenant, previous, whole, store is not False and len(whole) <= CONVERSATION_BYTES)

    def keep(self, conversation: Conversation, response_id: str, output: Sequence[dict[str, Any]]) -> None:
        """Keep a conversation with the output of its response."""
        items = b",".join(filter(None, (conversation.items, orjson.dumps(output)[1:-1])))
        tenant = conversation.tenant
        if len(items) > CONVERSATION_BYTES:
            return
        self._drop(tenant, response_id)
        self._kept.setdefault(tenant, OrderedDict())[response_id] = items
        self._count(tenant, len(items) + ENTRY_BYTES)
        if len(self._kept[tenant]) > self._most_count:
            self._drop(tenant, next(iter(self._kept[tenant])))
        while self.bytes > self._most_bytes:
            most = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(most, next(iter(self._kept[most])))

    def _get(self, response_id: str, tenant: str) -> bytes:
        kept = self._kept.get(tenant, OrderedDict())
        if response_id not in kept:
            message = f"There is no stored response '{response_id[:200]}': send the whole conversation."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        kept.move_to_end(response_id)
        return kept[response_id]

    def _drop(self, tenant: str, response_id: str) -> None:
        items = self._kept.get(tenant, OrderedDict()).pop(response_id, None)
        if items is not None:
            self._count(tenant, -len(items) - ENTRY_BYTES)

    def _count(self, tenant: str, size: int) -> None:
        self.bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        if not self._sizes[tenant]:
            del self._sizes[tenant], self._kept[tenant]
