"""Stored responses and their conversations: the bounded store of a worker, off by default, and /v1/responses/ID."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs

import orjson

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.http.fields.request_head import KEPT_SLASH

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


RESPONSES = "/v1/responses/"
INPUT_ITEMS = "/input_items"
PAGE, MOST_PAGE = 20, 100  # items of a list without `limit`, and at most
ORDERS = ("asc", "desc")
PREFIXES = {  # of ids
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class StoredPath(NamedTuple):
    """A path below /v1/responses. of_input: whether it names the list of input items."""

    response_id: str
    of_input: bool

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Parse a path; None for other paths."""
        if not path.startswith(RESPONSES):
            return None
        response_id = path.removeprefix(RESPONSES)
        bare = response_id.removesuffix(INPUT_ITEMS)
        return cls(bare.replace(KEPT_SLASH, "/"), bare != response_id) if bare and "/" not in bare else None

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.of_input else ("GET", "HEAD", "DELETE")


def stored_answer(store: ResponseStore | None, path: StoredPath, method: str, query: str, tenant: str) -> bytes:
    """The body of an answer about a stored response. Raises ApiError with status 404 without such a response of the tenant."""
    response_id = path.response_id
    if store is None:
        message = f"There is no stored response '{response_id[:200]}': this server stores none without '--response-store-mib'."
        raise _not_found(message)
    kept = store.find(response_id, tenant)
    if kept is None:
        message = f"There is no stored response '{response_id[:200]}' of this key: it may be evicted, deleted or not stored."
        raise _not_found(message)
    if method == "DELETE":
        store.delete(response_id, tenant)
        return orjson.dumps({"id": response_id, "object": "response", "deleted": True})
    given = parse_qs(query, keep_blank_values=True)
    if path.of_input:
        return orjson.dumps(_page(kept, response_id, given))
    for name in ("stream", "starting_after"):
        if given.get(name, ["false"]) not in (["false"], ["0"]):
            message = f"'{name}' is not supported: a stored response is not streamed. Remove it."
            raise bad_request(message, name, "unsupported_parameter")
    return kept.response


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, param="response_id", code="response_not_found")


def _page(kept: Kept, response_id: str, given: dict[str, list[str]]) -> dict[str, Any]:
    """One page of the input's items. given: `limit`, `order` and `after`. Raises ApiError."""
    limit = given.get("limit", [str(PAGE)])[-1]
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MOST_PAGE and len(limit) < 4):
        raise bad_request(f"'limit' must be 1 to {MOST_PAGE}.", "limit", "invalid_value")
    order = given.get("order", ["desc"])[-1]
    if order not in ORDERS:
        raise bad_request(f"'order' must be {' or '.join(ORDERS)}.", "order", "invalid_value")
    items = orjson.loads(b"[%b]" % kept.items[: kept.of_input])
    ids = [_id(item, i, response_id) for i, item in enumerate(items)]
    places = list(range(len(items)))[:: 1 if order == "asc" else -1]
    after = given.get("after", [""])[-1]
    if after:
        if after not in ids:
            raise bad_request(f"'after' must be the id of an input item, not '{after[:200]}'.", "after", "invalid_value")
        places = places[places.index(ids.index(after)) + 1 :]
    shown = [_shown(items[i], ids[i]) for i in places[: int(limit)]]
    edges = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **edges, "has_more": len(places) > int(limit)}


def _id(item: dict[str, Any], index: int, response_id: str) -> str:
    """The id that the client gave an item, or else an id made from its position."""
    given, prefix = item.get("id"), PREFIXES.get(item.get("type", "message"), "item")
    return given if type(given) is str and given else f"{prefix}_{response_id.removeprefix('resp_')}_in{index}"


def _shown(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An input item with all fields of OpenAI's type. item: an input item in any form that /v1/responses accepts."""
    kind = item.get("type", "message")
    head = {"type": kind, "id": item_id, "status": item.get("status") or "completed"}
    if kind == "message":
        return {**head, "role": item["role"], "content": _parts(item["content"], item["role"] == "assistant")}
    if kind == "reasoning":
        texts = {
            name: [{"type": of, "text": part["text"]} for part in item.get(name) or ()]
            for name, of in (("summary", "summary_text"), ("content", "reasoning_text"))
        }
        return {**head, **texts, "encrypted_content": item.get("encrypted_content")}
    if kind.endswith("_output"):
        output = item["output"]
        return {**head, "call_id": item["call_id"], "output": output if type(output) is str else _parts(output, False)}
    call = {name: item[name] for name in ("call_id", "namespace", "name", "input") if item.get(name) is not None}
    if kind != "function_call":
        return {**head, **call}
    given = item.get("arguments")
    written = given if type(given) is str else "" if given is None else orjson.dumps(given).decode()
    return {**head, **call, "arguments": written}


def _parts(content: str | Sequence[dict[str, Any]], of_assistant: bool) -> list[dict[str, Any]]:
    """The parts of a message or a result."""
    parts = [{"text": content}] if isinstance(content, str) else content
    shown: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") == "refusal":
            shown.append({"type": "refusal", "refusal": part["refusal"]})
        elif of_assistant:
            logprobs = part.get("logprobs") or []
            shown.append({"type": "output_text", "text": part["text"], "annotations": [], "logprobs": logprobs})
        else:
            shown.append({"type": "input_text", "text": part["text"]})
    return shown
