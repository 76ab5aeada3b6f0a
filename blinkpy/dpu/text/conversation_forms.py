"""Equivalent forms of conversations: messages joined, folded, ordered, named, filled, or left out."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

INSTRUCTIONS = ("system", "developer")  # roles
NINE = 9  # characters of a call's id, where templates insist on a length
EMPTY = "(empty)"  # content if a template insists on one
WRAPPED = "arguments"  # the name for arguments that are not an object, if a template needs an object

Message = dict[str, Any]


class Fitted(NamedTuple):
    """A message for the template. source: index of the given message."""

    source: int
    message: Message


def without_silence(messages: Sequence[Fitted]) -> list[Fitted]:
    """Remove assistant messages that have neither text nor calls, except next to instructions."""
    silent = [
        one.message["role"] == "assistant" and not one.message["content"] and not one.message.get("tool_calls")
        for one in messages
    ]
    kept = []
    for at, one in enumerate(messages):
        beside = {other.message["role"] for other in messages[max(0, at - 1) : at + 2]}
        if not silent[at] or beside & set(INSTRUCTIONS):
            kept.append(one)
    return kept


def with_every_result(messages: Sequence[Fitted]) -> Iterator[Fitted]:
    """Add an EMPTY result to each call without a result, such as a call that a user has interrupted."""
    lacking: dict[Any, int] = {}  # the calls so far without a result, and their messages
    for one in messages:
        if one.message["role"] == "tool":
            lacking.pop(one.message["tool_call_id"], None)
        else:
            yield from empty_results(lacking)
            lacking = {call.get("id"): one.source for call in one.message.get("tool_calls") or ()}
        yield one
    yield from empty_results(lacking)


def empty_results(calls: Mapping[Any, int]) -> Iterator[Fitted]:
    for name, source in calls.items():
        yield Fitted(source, {"role": "tool", "tool_call_id": name, "content": EMPTY})


def named_results(messages: Sequence[Fitted]) -> list[Fitted]:
    """Add to each result the name of its call."""
    names: dict[Any, str] = {}
    found = []
    for source, message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and not message.get("name"):
            message = message | {"name": names.get(message["tool_call_id"], message["tool_call_id"])}
        found.append(Fitted(source, message))
    return found


def ordered_results(messages: Sequence[Fitted]) -> list[Fitted]:
    """Sort results by the order of their calls."""
    found: list[Fitted] = []
    place: dict[Any, int] = {}
    for at, one in enumerate(messages):
        found.append(one)
        if one.message["role"] != "tool":
            place = {call.get("id"): i for i, call in enumerate(one.message.get("tool_calls") or ())}
        elif at + 1 == len(messages) or messages[at + 1].message["role"] != "tool":
            begin = next(i for i in range(len(found) - 1, -2, -1) if i < 0 or found[i].message["role"] != "tool") + 1
            found[begin:] = sorted(found[begin:], key=lambda one: place.get(one.message["tool_call_id"], len(place)))
    return found


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """Content as one text."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def as_object(written: str) -> dict[str, Any]:
    """Arguments as an object: empty for an empty text; otherwise an object with the JSON value, or with the text if it
    is not JSON."""
    if not written.strip():
        return {}
    try:
        return {WRAPPED: json.loads(written)}
    except (ValueError, RecursionError):
        return {WRAPPED: written}


def written(function: Mapping[str, Any]) -> str:
    """A call as text, in the form of Hermes."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {text or "{}"}}}\n</tool_call>'
    )


def as_turns(messages: Sequence[Fitted]) -> list[Fitted]:
    """Alternating texts of a user and an assistant, beginning with the user: calls, results and instructions become text. Most
    templates that refuse other forms accept this form.
    """
    turns: list[Fitted] = []
    for source, message in folded([Fitted(source, as_text(message)) for source, message in messages]):
        if not text_of(message["content"]):
            continue
        if turns and turns[-1].message["role"] == message["role"]:
            turns[-1] = Fitted(turns[-1].source, joined(turns[-1].message, message))
        else:
            turns.append(Fitted(source, message))
    if turns and turns[0].message["role"] == "assistant":
        turns.insert(0, Fitted(turns[0].source, {"role": "user", "content": EMPTY}))
    return turns


def as_text(message: Message) -> Message:
    """A message without reasoning, whose calls or results are text."""
    content, role = text_of(message["content"]), message["role"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = (written(call["function"]) for call in message.get("tool_calls") or ())
    return {"role": role, "content": "\n".join(filter(None, (content, *calls)))}


def as_one(messages: Sequence[Fitted]) -> list[Fitted]:
    """The whole conversation in one user message, in which each turn begins with its role."""
    turns = as_turns(messages)
    if len(turns) < 2:
        return turns
    text = "\n\n".join(f"{message['role']}: {text_of(message['content'])}" for _, message in turns)
    return [Fitted(turns[-1].source, {"role": "user", "content": text})]


def joined(first: Message, second: Message) -> Message:
    """Two messages of one role as one."""
    texts = [text_of(message["content"]) for message in (first, second)]
    joined = {**first, **second, "content": "\n\n".join(filter(None, texts))}
    for name in ("reasoning_content", "thinking"):
        thoughts = [message[name] for message in (first, second) if message.get(name)]
        if thoughts:
            joined[name] = "\n".join(thoughts)
    return joined


def apart_from_turns(messages: Sequence[Fitted]) -> list[Fitted]:
    """Move instructions between two turns of one kind, or after results, into a user message, since these turns are merged."""
    found: list[Fitted] = []
    begin = 0
    for at, one in enumerate(messages):
        if one.message["role"] in INSTRUCTIONS:
            continue
        if at > begin and begin > 0:
            around = {messages[begin - 1].message["role"], one.message["role"]}
            found += messages[begin:at] if around == {"user", "assistant"} else folded(messages[begin:at])
        found.append(one)
        begin = at + 1
    return found + list(messages[begin:])


def folded(messages: Sequence[Fitted]) -> list[Fitted]:
    """Put instructions at the start of the next message if a user sent it, otherwise into a separate user message."""
    found: list[Fitted] = []
    waiting: list[Fitted] = []
    for one in (*messages, None):
        if one is not None and one.message["role"] in INSTRUCTIONS:
            waiting.append(one)
            continue
        if waiting:
            instructions = "\n\n".join(text_of(instruction.message["content"]) for instruction in waiting)
            if one is not None and one.message["role"] == "user":
                one = Fitted(one.source, one.message | {"content": f"{instructions}\n\n{text_of(one.message['content'])}"})
            else:
                found.append(Fitted(waiting[0].source, {"role": "user", "content": instructions}))
            waiting = []
        if one is not None:
            found.append(one)
    return found


def short_ids(messages: Sequence[Fitted]) -> list[Fitted]:
    """Give each call an id of NINE letters and digits; any other id is replaced by its hash. A call without an id gets the id of
    the result at its position, or else a hash of its position.
    """
    found: list[Fitted] = []
    for at, (index, message) in enumerate(messages):
        if message.get("tool_calls"):
            results = []
            for following in messages[at + 1 :]:
                if following.message["role"] != "tool":
                    break
                results.append(following.message["tool_call_id"])
            calls = []
            for number, call in enumerate(message["tool_calls"]):
                own = call.get("id") or (results[number] if number < len(results) else f"{index}.{number}")
                calls.append({**call, "id": short_id(own)})
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            message = message | {"tool_call_id": short_id(message["tool_call_id"])}
        found.append(Fitted(index, message))
    return found


def short_id(given: str) -> str:
    """An id of NINE letters and digits: the given id if it has that form, else its hash."""
    if len(given) == NINE and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:NINE]
