"""Laws of the equivalent forms of random conversations: each form has its changes, and no others."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import dropwhile, pairwise
from typing import Any

import pytest

from blinkpy.dpu.text import conversation_forms as F
from blinkpy.dpu.text.conversation_forms import Fitted, Message

ROUNDS = 400
ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(draw: random.Random) -> list[Fitted]:
    """Messages of all roles in any order. Calls may lack ids and results; results may be of no call, or in another order."""
    found, calls = list[Message](), list[str]()
    while len(found) < draw.randint(1, 12):
        role = draw.choice(ROLES)
        if role == "tool":
            name = draw.choice([*calls, "call_unknown"])
            found.append({"role": role, "content": f"r{len(found)}", "tool_call_id": name})
            continue
        message: Message = {
            "role": role,
            "content": draw.choice(["", f"t{len(found)}"]) if role == "assistant" else f"t{len(found)}",
        }
        if role == "assistant" and draw.random() < 0.6:
            ids = [
                draw.choice([None, f"call_{len(found)}_{i}", f"abcdefg{len(found) % 10}{i}"]) for i in range(draw.randint(1, 3))
            ]
            calls = [one for one in ids if one] or calls
            message["tool_calls"] = [
                {"type": "function", "function": {"name": f"f{len(found)}_{i}", "arguments": {}}} | ({"id": one} if one else {})
                for i, one in enumerate(ids)
            ]
            results = [one for one in ids if one and draw.random() < 0.7]
            draw.shuffle(results)
            found.append(message)
            found += [{"role": "tool", "content": f"r{one}", "tool_call_id": one} for one in results]
            continue
        if role == "assistant" and draw.random() < 0.3:
            message[draw.choice(["reasoning_content", "thinking"])] = f"h{len(found)}"
        found.append(message)
    return [Fitted(i, message) for i, message in enumerate(found)]


def calls_of(one: Fitted) -> list[dict[str, Any]]:
    return one.message.get("tool_calls") or []


def runs(messages: Sequence[Fitted]) -> list[list[Fitted]]:
    """Each message with the results after it; results at the start are a separate run."""
    found: list[list[Fitted]] = []
    for one in messages:
        if one.message["role"] == "tool" and found:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def check_ids(given: list[Fitted]) -> None:
    """Nine characters; of different calls different ones; of a call and its results equal ones."""
    changed, mapped, ids = F.short_ids(given), dict[str, str](), Counter[str]()
    assert [one.source for one in changed] == [one.source for one in given]
    for old, new in zip(given, changed, strict=True):
        assert {**new.message, "tool_calls": 0, "tool_call_id": 0} == {**old.message, "tool_calls": 0, "tool_call_id": 0}
        for before, after in zip(calls_of(old), calls_of(new), strict=True):
            assert len(after["id"]) == F.NINE and after["id"].isalnum() and after | {"id": 0} == before | {"id": 0}
            if "id" in before:
                assert mapped.setdefault(before["id"], after["id"]) == after["id"]
            elif after["id"] not in mapped.values():  # else that of the result at its place
                ids[after["id"]] += 1
        if old.message["role"] == "tool":
            name = old.message["tool_call_id"]
            assert mapped.setdefault(name, new.message["tool_call_id"]) == new.message["tool_call_id"]
    results = {one.message["tool_call_id"] for one in changed if one.message["role"] == "tool"}
    assert all(count == 1 for name, count in ids.items() if name not in results), "calls of two messages have one id"
    assert len(set(mapped.values())) == len(mapped)


def check_order(given: list[Fitted]) -> None:
    """The results of a run in the order of its calls, those of no call last, and otherwise as they were."""
    changed = F.ordered_results(given)
    for before, after in zip(runs(given), runs(changed), strict=True):
        place = {call.get("id"): i for i, call in enumerate(calls_of(before[0]))}
        head = 0 if before[0].message["role"] == "tool" else 1
        wanted = sorted(before[head:], key=lambda one: (place.get(one.message["tool_call_id"], 99), before.index(one)))
        assert after == before[:head] + wanted


def check_results(given: list[Fitted]) -> None:
    """Behind each run stand empty results of the calls that lack one, in their order; no other message is new."""
    changed = list(F.with_every_result(given))
    for before, after in zip(runs(given), runs(changed), strict=True):
        has = {one.message["tool_call_id"] for one in before if one.message["role"] == "tool"}
        lacking = dict.fromkeys(call.get("id") for call in calls_of(before[0]) if call.get("id") not in has)
        added = [Fitted(before[0].source, {"role": "tool", "tool_call_id": name, "content": F.EMPTY}) for name in lacking]
        assert after == before + added


def check_names(given: list[Fitted]) -> None:
    """Each result has the name of the last call with its id before it, or its id."""
    names = dict[Any, str]()
    for old, new in zip(given, F.named_results(given), strict=True):
        names |= {call.get("id"): call["function"]["name"] for call in calls_of(old)}
        if old.message["role"] == "tool":
            name = old.message["tool_call_id"]
            assert new == Fitted(old.source, old.message | {"name": names.get(name, name)})
        else:
            assert new == old


def check_silence(given: list[Fitted]) -> None:
    """A message of an assistant without text and calls is left out, unless a neighbour has instructions."""
    wanted = list[Fitted]()
    for at, one in enumerate(given):
        around = [given[i].message["role"] for i in (at - 1, at + 1) if 0 <= i < len(given)]
        silent = one.message["role"] == "assistant" and not one.message["content"] and not calls_of(one)
        if not silent or "system" in around or "developer" in around:
            wanted.append(one)
    assert F.without_silence(given) == wanted


def check_folds(given: list[Fitted]) -> None:
    """No instructions are left; each text is still there, in its order."""
    later = list(dropwhile(lambda one: one.message["role"] in F.INSTRUCTIONS, given))
    for form, before in ((F.folded, given), (F.apart_from_turns, later)):
        texts = [text for one in form(before) for text in (one.message["content"] or "").split("\n\n") if text]
        assert texts == [one.message["content"] for one in before if one.message["content"]]
    assert not any(one.message["role"] in F.INSTRUCTIONS for one in F.folded(given))


def check_joins(given: list[Fitted]) -> None:
    """Two messages as one: texts and thoughts of both, in their order."""
    for one, other in pairwise(given):
        whole = F.joined(one.message, other.message)
        assert [text for text in whole["content"].split("\n\n") if text] == [
            some.message["content"] for some in (one, other) if some.message["content"]
        ]
        for name in ("reasoning_content", "thinking"):
            assert whole.get(name, "").split() == [some.message[name] for some in (one, other) if name in some.message]


@pytest.mark.parametrize(
    "check",
    [check_ids, check_order, check_results, check_names, check_silence, check_folds, check_joins],
    ids=lambda check: check.__name__,
)
def test_a_form_changes_what_it_says_and_nothing_else(check: Callable[[list[Fitted]], None], seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        given = conversation(draw)
        try:
            check(given)
        except AssertionError:
            print([one.message for one in given])
            raise
