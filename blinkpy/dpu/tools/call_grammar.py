"""Grammars of tool calls: forced calls, with a prefix in the prompt, and optional calls that must be valid.

Grammars are plain JSON, of these forms:

    {"text": T}  {"schema": S}  {"regex": R}  {"without": R}  {"token": T}  {"object": true}
    {"sequence": [G, ...]}  {"any": [G, ...]}
    {"repeat": G, "low": n, "high": m}   m null: any number
    {"separated": G, "by": B}            G one or more times, with B between
    {"part": G, "of": [F, N]}            the arguments of tool N, whose schema came in the field F
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from blinkpy.dpu.grammar.compile_grammar import Grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.schema_keywords import KEYWORDS, REFERENCE, REFUSED
from blinkpy.dpu.tools.call_format import ArgumentText, CallFormat, CallText
from blinkpy.dpu.tools.reasoning import ReasoningTags

ANY_OBJECT: Grammar = {"object": True}
ANY_TEXT: Grammar = {"regex": r"[\s\S]*"}
SPACES: Grammar = {"regex": r"[ \t\r\n]{0,8}"}  # around reasoning: without an end, some models write nothing else
IN_TAGS = re.compile(r"[^<>\"'\s]{1,64}")  # a name
OF_NAMED = ("type", "properties", "required", "additionalProperties")  # keywords for arguments that are NAME=VALUE


class CallableTool(Protocol):
    """A function with the JSON Schema of its arguments."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...
    @property
    def strict(self) -> bool: ...
    @property
    def where(self) -> str: ...


class ForcedCalls(NamedTuple):
    """prefix: start of the answer, appended to the prompt. grammar: grammar of the rest of the answer."""

    prefix: str
    grammar: Grammar


def forced_calls(calls: CallFormat, tools: Sequence[CallableTool], parallel: bool) -> ForcedCalls:
    """One call of one of the tools, or several if they may be parallel, and nothing else. tools: at least one."""
    text = calls.text
    heads = [tool.name + text.middle for tool in tools]
    bodies = [_arguments(tool, text.arguments) for tool in tools]
    only = len(tools) == 1
    prefix = text.begin + text.open + (heads[0] if only else "")
    return ForcedCalls(prefix, _calls(text, heads, bodies, parallel, bodies[0] if only else None))


def constrained_calls(
    calls: CallFormat, tools: Sequence[CallableTool], parallel: bool, content: Grammar | None, tags: ReasoningTags | None = None
) -> Grammar:
    """An answer with or without valid calls: the text that begins a call is followed by a call.

    Tools that are not strict accept any object. content: the grammar of an answer without calls; None: any text, also
    around calls. tags: tags of reasoning that may come first. Other text may not begin with these tags, because the automaton
    would have to track both cases.
    """
    text = calls.text
    begins = calls.begins.replace("{names}", "|".join(tool.name for tool in tools))
    bodies = [_arguments(tool, text.arguments) if tool.strict or text.arguments else ANY_OBJECT for tool in tools]
    one = _sequence(text.begin + text.open, _calls(text, [tool.name + text.middle for tool in tools], bodies, parallel))
    plain: Grammar = {"without": begins}
    first: Grammar = plain if tags is None else {"without": rf"^[ \t\r\n]{{0,8}}{re.escape(tags.open)}|{begins}"}
    if content is not None or begins.startswith("^"):
        return {"any": [first if content is None else content, one]}
    return _sequence(first, {"repeat": _sequence(one, plain), "low": 0, "high": None if parallel else 1})


def after_reasoning(grammar: Grammar, tags: ReasoningTags, inside: bool) -> Grammar:
    """The grammar of an answer, with reasoning before it. inside: whether the prompt has already opened the tag."""
    rest = _sequence({"without": re.escape(tags.close)}, tags.close, SPACES)
    return _sequence(rest if inside else _maybe(_sequence(SPACES, tags.open, rest)), grammar)


def channel_answer(tools: Sequence[CallableTool], content: Grammar | None, must_call: bool, begun: bool) -> Grammar:
    """An answer in channels (blinkpy.dpu.tools.harmony_calls).

    Messages that are neither the answer nor a call are followed by a final message or a call, or by a call if one is forced.
    content: grammar of the final message; None: any text. begun: whether the prompt ends within the first message. Tools that are
    not strict accept any object, unless a call is forced.
    """
    more = _sequence(ANY_TEXT, "<|end|><|start|>assistant")
    before = _sequence("<|channel|>", {"choice": ["analysis", "commentary"]}, "<|message|>", more)
    forms = [] if must_call else [_sequence("<|channel|>final<|message|>", ANY_TEXT if content is None else content)]
    bodies = [_arguments(tool) if tool.strict or must_call else ANY_OBJECT for tool in tools]
    for names, body in _by_body([f" to=functions.{tool.name}" for tool in tools], bodies):
        heads = [{"text": head} for to in names for head in (f"<|channel|>commentary{to}", f"{to}<|channel|>commentary")]
        kinds = [{"text": text} for text in (" <|constrain|>json", "<|constrain|>json", " json")]
        forms.append(_sequence({"any": heads}, {"any": kinds}, "<|message|>", body))
    return _sequence(*((more,) if begun else ()), {"repeat": before, "low": 0, "high": None}, {"any": forms})


def with_tokens(grammar: Grammar, specials: re.Pattern[str]) -> Grammar:
    """The grammar with the names of special tokens replaced by the tokens. specials: pattern of the names."""
    ((kind, value), *rest) = grammar.items()
    if kind == "text":
        names = specials.findall(value)
        parts = [{"text": part} for part in specials.split(value)]
        tokens = [{"token": name} for name in names]
        between = [part for pair in zip(parts, tokens, strict=False) for part in pair] + parts[-1:]
        return {"sequence": [part for part in between if part != {"text": ""}]} if names else grammar
    if kind in ("sequence", "any"):
        return {kind: [with_tokens(part, specials) for part in value]}
    if kind == "separated":
        return {kind: with_tokens(value, specials), "by": with_tokens(grammar["by"], specials)}
    return {kind: with_tokens(value, specials), **dict(rest)} if kind in ("repeat", "part") else grammar


def _calls(
    text: CallText, heads: Sequence[str], bodies: Sequence[Grammar], parallel: bool, first: Grammar | None = None
) -> Grammar:
    """The grammar from a call's name to the end of the last call. first: grammar of arguments whose name precedes the grammar."""
    any_call = {"any": [_sequence({"any": [{"text": head} for head in some]}, body) for some, body in _by_body(heads, bodies)]}
    between = text.close, text.between, text.open
    if first is not None:
        more = {"repeat": _sequence(*between, any_call), "low": 0, "high": None if parallel else 0}
        return _sequence(first, more, text.close, text.end)
    calls: Grammar = {"separated": any_call, "by": _sequence(*between)} if parallel else any_call
    return _sequence(calls, text.close, text.end)


def _by_body(heads: Sequence[str], bodies: Sequence[Grammar]) -> list[tuple[list[str], Grammar]]:
    """Merge the heads that have the same remainder, so that the automaton contains it only once."""
    found: dict[str, tuple[list[str], Grammar]] = {}
    for head, body in zip(heads, bodies, strict=True):
        found.setdefault(json.dumps(body.get("part", body)), ([], body))[0].append(head)
    return list(found.values())


def _sequence(*parts: str | Grammar) -> Grammar:
    return {"sequence": [{"text": part} if isinstance(part, str) else part for part in parts if part != ""]}


def _arguments(tool: CallableTool, shape: ArgumentText | None = None) -> Grammar:
    """The grammar of a call's arguments. shape: the form of each argument, if they are not one JSON object."""
    schema, part = {"type": "object", **tool.parameters}, [tool.where, tool.name]
    try:
        body = {"schema": schema} if shape is None else _named_arguments(schema, shape)
    except GrammarError as error:
        error.part = part
        raise
    return {"part": body, "of": part}


def _named_arguments(schema: Mapping[str, Any], shape: ArgumentText) -> Grammar:
    _check_named(schema, shape)
    between = shape.between
    whole = {
        name: _sequence(shape.open + name + shape.middle, _property(name, entry, schema, shape), shape.close)
        for name, entry in schema.get("properties", {}).items()
    }
    required = [name for name in whole if name in schema.get("required", ())]
    optional = [name for name in whole if name not in required]
    first = _sequence(*(part for i, name in enumerate(required) for part in (between * (i > 0), whole[name])))
    if required:
        return _sequence(first, *(_maybe(_sequence(between, whole[name])) for name in optional))
    starts = []
    for i, name in enumerate(optional):
        later = [_maybe(_sequence(between, whole[other])) for other in optional[i + 1 :]]
        starts.append(_sequence(whole[name], *later))
    return _maybe({"any": starts}) if starts else _sequence()


def _check_named(schema: Mapping[str, Any], shape: ArgumentText) -> None:
    """Raise GrammarError for root keywords that separate grammars of the arguments can't enforce, and for invalid
    names: not identifiers, or not allowed in tags."""
    for key in schema:
        if key not in OF_NAMED and (key in KEYWORDS or key in REFUSED or key == REFERENCE):
            raise GrammarError(f"'{key}' is not supported at the top level of parameters with this model's tool-call format.")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if type(properties) is not dict or type(required) is not list:
        raise GrammarError("'properties' must be an object, and 'required' an array.")
    for name in properties:
        fits = bool(IN_TAGS.fullmatch(name)) if shape.raw else name.isidentifier()
        if not fits:
            raise GrammarError(f"'{name[:100]}' can't be a parameter name in this model's tool-call format.")
    if any(name not in list(properties) for name in required):
        raise GrammarError("'required' must list names in 'properties' in this model's tool-call format.")


def _maybe(grammar: Grammar) -> Grammar:
    return {"repeat": grammar, "low": 0, "high": 1}


def _property(name: str, schema: Any, root: Mapping[str, Any], shape: ArgumentText) -> Grammar:
    """The grammar of one property's values. The root schema is included only if the property may refer to it, because a grammar
    has a size limit."""
    if shape.raw and isinstance(schema, Mapping) and schema.get("type") == "string":
        return _raw_string(name, schema, shape)
    grammar: Grammar = {"schema": schema, "path": f"#/properties/{name}"}
    return {**grammar, "root": root} if REFERENCE in json.dumps(schema) else grammar


def _raw_string(name: str, schema: Mapping[str, Any], shape: ArgumentText) -> Grammar:
    """A string without quotes, up to its closing tag. Raises GrammarError for keywords that can't be enforced."""
    close, quote = shape.quote or shape.close.strip(), shape.quote
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [value for value in values if isinstance(value, str) and close not in value] if isinstance(values, list) else []
        if not texts:
            raise GrammarError(f"'enum' of '{name[:100]}' has no string that this model's tool-call format can hold.")
        return {"any": [{"text": quote + text + quote} for text in texts]}
    for key in ("pattern", "minLength", "maxLength", "format"):
        if key in schema:
            raise GrammarError(f"'{key}' of '{name[:100]}' is not supported with this model's tool-call format.")
    return _sequence(quote, {"without": re.escape(close)}, quote)
