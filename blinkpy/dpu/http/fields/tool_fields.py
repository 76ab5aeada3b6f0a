"""The fields of a chat about tools and templates: tools, the choice among them, calls and results in messages."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.value_checks import PART_FIELDS, only_known, text, typed, unsupported

MAX_TOOLS = 128  # of a request; also calls of one message
MAX_TOOLS_BYTES = 1 << 18  # of all tools as JSON
MAX_DEPTH = 32  # of containers in a tool, in the arguments of a call, in chat_template_kwargs
MAX_VALUES_BYTES = 1 << 14  # of chat_template_kwargs as JSON
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
HARMLESS_KEYS = {"defer_loading": False, "allowed_callers": ["direct"]}  # of a tool
# Searches that OpenAI's service makes by itself: agents list one beside their functions, and no answer has to use it.
HOSTED = ("web_search", "web_search_2025_08_26")
NO_PARAMETERS = {"type": "object", "properties": {}}
REASONING_NAMES = ("thinking", "reasoning", "reasoning_content")  # of a message's reasoning; the last one that is there counts
# Of messages of one role, beside those of all. What OpenAI's client has parsed comes back with the text that it was parsed from.
MORE_MESSAGE_FIELDS = {"assistant": ("tool_calls", *REASONING_NAMES, "parsed", "refusal"), "tool": ("tool_call_id",)}


class Namespace(NamedTuple):
    """Of functions that belong together. The model does not see the description."""

    name: str
    description: str

    def full(self, function: str) -> str:
        """The name that the model sees for a function of this namespace."""
        return f"{self.name}__{function}"


class Tool(NamedTuple):
    """A function that the model may call. name: as the model sees it; described: as chat templates take it; strict: arguments
    must be as the schema `parameters` says; where: the field that `parameters` came in."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    described: Mapping[str, Any]
    namespace: Namespace | None = None
    where: str = ""

    @property
    def own_name(self) -> str:
        """Its name in its namespace."""
        return self.name if self.namespace is None else self.name.removeprefix(self.namespace.full(""))


class ToolChoice(NamedTuple):
    """none, auto, or required; of one function, if it has a name, or of those that are allowed, None for all."""

    mode: str = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def allows(self, tool: str) -> bool:
        """Whether a function of this name is among those that are allowed."""
        return self.allowed is None or tool in self.allowed


def depth_of(value: Any) -> int:
    """How many containers are inside of each other; at most MAX_DEPTH + 1 are counted."""
    layer, depth = [value], 0
    while depth <= MAX_DEPTH:
        inner = [item for item in layer if type(item) in (dict, list)]
        if not inner:
            break
        depth += 1
        layer = [entry for item in inner for entry in (item.values() if type(item) is dict else item)]
    return depth


def _bounded(name: str, value: Any, most_bytes: int) -> Any:
    """A JSON value within the limits."""
    if depth_of(value) > MAX_DEPTH:
        raise bad_request(f"'{name}' is nested more than {MAX_DEPTH} deep.", name, "invalid_value")
    try:
        written = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise bad_request(f"'{name}' has a number that is too large.", name, "invalid_value") from error
    if len(written) > most_bytes:
        raise bad_request(f"'{name}' has {len(written)} bytes as JSON; at most {most_bytes} are possible.", name, "invalid_value")
    if b"\\u0000" in written:
        raise bad_request(f"'{name}' contains a NUL character.", name, "invalid_value")
    return value


def _object(name: str, value: Any, keys: Sequence[str]) -> dict[str, Any]:
    """An object with no other keys; those that are null are left out."""
    for key, entry in typed(name, value, dict).items():
        if key not in keys and entry is not None:
            raise unsupported(f"{name}.{key}")
    return {key: entry for key, entry in value.items() if entry is not None}


def _function_name(name: str, value: Any) -> str:
    if value is None:
        raise bad_request(f"'{name}' is missing.", name, "missing_required_parameter")
    if not TOOL_NAME.fullmatch(typed(name, value, str)):
        raise bad_request(f"'{name}' must be 1 to 64 letters, digits, '_' or '-'.", name, "invalid_value")
    return str(value)


def _function(name: str, value: Any) -> None:
    if value != "function":
        raise bad_request(f"'{name}' must be 'function'.", name, "invalid_value")


def tools(name: str, value: Any, flat: bool = False) -> tuple[Tool, ...]:
    """The field `tools`. flat: as /v1/responses has it, without `function` around a tool's description, with namespaces and
    searches."""
    if len(typed(name, value, list)) > MAX_TOOLS:
        raise bad_request(f"'{name}' can hold at most {MAX_TOOLS} tools, not {len(value)}.", name, "invalid_value")
    _bounded(name, value, MAX_TOOLS_BYTES)
    if flat:
        checked, places = _flat_tools(name, value)
    else:
        checked = [_tool(f"{name}[{i}]", tool, False) for i, tool in enumerate(value)]
        places = [f"{name}[{i}].function.name" for i in range(len(value))]
    names = [tool.name for tool in checked]
    for i, tool in enumerate(names):
        if tool in names[:i]:
            raise bad_request(f"'{name}' has two functions named '{tool}'.", places[i], "invalid_value")
    return tuple(checked)


def _flat_tools(name: str, value: list[Any]) -> tuple[list[Tool], list[str]]:
    """Those of /v1/responses, and where their names stand. The model sees no searches; they can't be all that is asked for."""
    found, places = [], []
    kinds = [typed(f"{name}[{i}]", given, dict).get("type") for i, given in enumerate(value)]
    only_hosted = all(kind in HOSTED for kind in kinds)
    for i, (kind, given) in enumerate(zip(kinds, value, strict=True)):
        where = f"{name}[{i}]"
        if kind == "namespace":
            inside = _of_namespace(where, given)
            found += inside
            places += [f"{where}.tools[{j}].name" for j in range(len(inside))]
        elif kind not in HOSTED or only_hosted:
            found.append(_tool(where, given, True))
            places.append(f"{where}.name")
    if len(found) > MAX_TOOLS:
        raise bad_request(f"'{name}' can hold at most {MAX_TOOLS} tools, not {len(found)}.", name, "invalid_value")
    return found, places


def _of_namespace(where: str, value: Any) -> list[Tool]:
    """The functions of a namespace."""
    given = _object(where, value, ("type", "name", "description", "tools"))
    description = typed(f"{where}.description", given.get("description", ""), str)
    namespace = Namespace(_function_name(f"{where}.name", given.get("name")), description)
    functions, found = typed(f"{where}.tools", given.get("tools", []), list), []
    for i, function in enumerate(functions):
        tool = _tool(f"{where}.tools[{i}]", function, True)
        name = _function_name(f"{where}.tools[{i}].name", namespace.full(tool.name))
        described = {**tool.described, "function": {**tool.described["function"], "name": name}}
        found.append(tool._replace(name=name, described=described, namespace=namespace))
    return found


def _tool(where: str, value: Any, flat: bool) -> Tool:
    _function(f"{where}.type", typed(where, value, dict).get("type"))
    value = {key: entry for key, entry in value.items() if key not in HARMLESS_KEYS or entry != HARMLESS_KEYS[key]}
    given = _object(where, value, ("type", *(FUNCTION_KEYS if flat else ("function",))))
    if flat:
        function = {key: entry for key, entry in given.items() if key != "type"}
    else:
        where = f"{where}.function"
        function = _object(where, given.get("function"), FUNCTION_KEYS)
    name = _function_name(f"{where}.name", function.get("name"))
    strict = typed(f"{where}.strict", function.pop("strict", False), bool)
    typed(f"{where}.description", function.get("description", ""), str)
    parameters = typed(f"{where}.parameters", function.setdefault("parameters", NO_PARAMETERS), dict)
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (type(kinds) is list and "object" in kinds):  # no call has other arguments
        place = f"{where}.parameters.type"
        raise bad_request(f"'{place}' must be 'object', as the arguments of a call are.", place, "invalid_value")
    return Tool(name, parameters, strict, {"type": "function", "function": function}, where=f"{where}.parameters")


def tool_choice(name: str, value: Any, flat: bool = False) -> ToolChoice:
    """The field `tool_choice`. flat: as /v1/responses has it."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if type(value) is not dict:
        message = f"'{name}' must be 'none', 'auto', 'required' or an object that names functions."
        raise bad_request(message, name, "invalid_value")
    if value.get("type") == "allowed_tools":
        return _allowed_tools(name, value, flat)
    return ToolChoice("required", _named_function(name, value, flat))


def _named_function(name: str, value: Any, flat: bool) -> str:
    """The function that an object names as its only content."""
    _function(f"{name}.type", typed(name, value, dict).get("type"))
    given = _object(name, value, ("type", "name" if flat else "function"))
    function = given if flat else _object(f"{name}.function", given.get("function"), ("name",))
    return _function_name(f"{name}.name" if flat else f"{name}.function.name", function.get("name"))


def _allowed_tools(name: str, value: dict[str, Any], flat: bool) -> ToolChoice:
    """The choice among some of the tools, each of which may come more than once."""
    given = _object(name, value, ("type", "mode", "tools") if flat else ("type", "allowed_tools"))
    where = name if flat else f"{name}.allowed_tools"
    allowed = given if flat else _object(where, given.get("allowed_tools", {}), ("mode", "tools"))
    if allowed.get("mode") not in ("auto", "required"):
        raise bad_request(f"'{where}.mode' must be 'auto' or 'required'.", f"{where}.mode", "invalid_value")
    named = typed(f"{where}.tools", allowed.get("tools", []), list)
    if not 1 <= len(named) <= MAX_TOOLS:
        message = f"'{where}.tools' must name 1 to {MAX_TOOLS} functions, not {len(named)}."
        raise bad_request(message, f"{where}.tools", "invalid_value")
    names = [_named_function(f"{where}.tools[{i}]", tool, flat) for i, tool in enumerate(named)]
    return ToolChoice(allowed["mode"], None, tuple(dict.fromkeys(names)))


def template_values(name: str, value: Any) -> dict[str, Any]:
    """The field `chat_template_kwargs`."""
    return dict(_bounded(name, typed(name, value, dict), MAX_VALUES_BYTES))


def reasoning_effort(name: str, value: Any) -> str:
    """The field `reasoning_effort`."""
    if value not in EFFORTS:
        raise bad_request(f"'{name}' must be one of {', '.join(EFFORTS)}.", name, "invalid_value")
    return str(value)


def check_choice(choice: ToolChoice | None, given: Sequence[Tool]) -> None:
    """Raise ApiError where the choice does not fit the tools."""
    if choice is None:
        return
    if choice.mode == "required" and not given:
        raise bad_request("'tool_choice' asks for a call, but there are no 'tools'.", "tool_choice", "invalid_value")
    known = [tool.name for tool in given]
    for name in (choice.name,) if choice.name is not None else choice.allowed or ():
        if name not in known:
            raise bad_request(f"'tool_choice' names '{name}', which is not in 'tools'.", "tool_choice", "invalid_value")


# ---- messages --------------------------------------------------------------------------------------------------------


def tool_message_fields(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message about calls, results and reasoning, checked. Arguments that are an object become one, as chat
    templates expect; others stay text."""
    fields: dict[str, Any] = {}
    if value["role"] == "tool":
        if value.get("tool_call_id") is None:
            raise bad_request(f"'{where}.tool_call_id' is missing.", f"{where}.tool_call_id", "missing_required_parameter")
        fields["tool_call_id"] = text(f"{where}.tool_call_id", value["tool_call_id"])
    if value["role"] != "assistant":
        return fields
    for key in REASONING_NAMES:
        if value.get(key) is not None:
            fields["reasoning_content"] = text(f"{where}.{key}", value[key])
    calls = value.get("tool_calls")
    if calls:
        if len(typed(f"{where}.tool_calls", calls, list)) > MAX_TOOLS:
            message = f"'{where}.tool_calls' can hold at most {MAX_TOOLS} calls, not {len(calls)}."
            raise bad_request(message, f"{where}.tool_calls", "invalid_value")
        fields["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return fields


def _call(where: str, value: Any) -> dict[str, Any]:
    given = _object(where, value, ("id", "type", "function", "index"))
    _function(f"{where}.type", given.get("type", "function"))
    function = _object(f"{where}.function", given.get("function"), ("name", "arguments", "parsed_arguments"))
    call = _called(f"{where}.function", function)
    return call if "id" not in given else {"id": text(f"{where}.id", given["id"]), **call}


def _called(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    name = _function_name(f"{where}.name", function.get("name"))
    arguments = text(f"{where}.arguments", function.get("arguments", ""))
    return {"type": "function", "function": {"name": name, "arguments": _arguments(f"{where}.arguments", arguments)}}


def call_item(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A call as an input item of /v1/responses, in the form that chat templates take."""
    given = _object(where, value, ("type", "id", "call_id", "name", "namespace", "arguments", "status"))
    if "namespace" in given:
        namespace = Namespace(_function_name(f"{where}.namespace", given["namespace"]), "")
        given["name"] = namespace.full(_function_name(f"{where}.name", given.get("name")))
    return {"id": _call_id(where, given), **_called(where, given)}


def result_item(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A call's result as an input item of /v1/responses, as a message. Raises ApiError for what is no text."""
    given = _object(where, value, ("type", "id", "call_id", "output", "status", "name", "namespace"))
    output, texts = given.get("output"), []
    parts = output if type(output) is list else [{"type": "input_text", "text": output}]
    for i, part in enumerate(parts):
        place = f"{where}.output[{i}]" if parts is output else f"{where}.output"
        if type(part) is not dict or part.get("type") not in ("input_text", "output_text", "text"):
            raise bad_request(f"'{place}' must be an object of type 'input_text'.", place, "unsupported_content")
        only_known(place, part, PART_FIELDS.union(("annotations", "logprobs")))
        texts.append(text(place, part.get("text")))
    return {"role": "tool", "content": "\n".join(texts), "tool_call_id": _call_id(where, given)}


def _call_id(where: str, given: Mapping[str, Any]) -> str:
    if given.get("call_id") is None:
        raise bad_request(f"'{where}.call_id' is missing.", f"{where}.call_id", "missing_required_parameter")
    return str(text(f"{where}.call_id", given["call_id"]))


def _arguments(where: str, written: str) -> dict[str, Any] | str:
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written
    if depth_of(arguments) > MAX_DEPTH:
        raise bad_request(f"'{where}' is nested more than {MAX_DEPTH} deep.", where, "invalid_value")
    return arguments if type(arguments) is dict else written
