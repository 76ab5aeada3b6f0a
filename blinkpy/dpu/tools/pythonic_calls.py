"""Llama 3.2 and 4: an answer that is a Python list of calls, [f(a=1), g()]. Nothing marks a call, so it must name one
of the request's tools. Each call is emitted once its arguments are complete and converted to JSON."""

import ast
import json
import re
import warnings
from typing import Any

from blinkpy.dpu.tools.call_format import KEYWORDS, CallFormat, CallText
from blinkpy.dpu.tools.json_call import NAME
from blinkpy.dpu.tools.output_source import PYTHON_QUOTES, NotACall, OutputSource, Steps

START, END = TOKENS = ("<|python_start|>", "<|python_end|>")
CALL_CHARACTERS = 1 << 16  # of one call; it is held back until it ends
MOST_DEPTH = 32  # of brackets
PREFIX, DELIMITERS = "p_", "\"'([{,:=)]}"
_BREAKS = re.compile(r"[\r\n]+")
_CONTINUED = re.compile(r"((?<!\\)(?:\\\\)*)\\(?:\r\n|\r|\n)")
CONSTANTS = {"true": True, "false": False, "null": None}  # some models write JSON's
# Literals and brackets have no other tokens. Python's parser, which fails on deep expressions, sees nothing else.
_TOKEN = re.compile(
    r"""\s*(?:[rRuU]?(?:"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')"""
    r"|[+-]?(?:0[xXoObB][0-9a-fA-F_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?)"
    r"|[^\W\d]\w*|[\[\](){},:=])\s*",
    re.DOTALL,
)


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    source.mark()
    try:
        yield from source.skip(START)
        yield from source.expect("[")
        while True:
            yield from source.peek()
            name = yield from source.match(NAME)
            if name not in known or (yield from source.peek()) != "(":
                raise NotACall
            source.allow(CALL_CHARACTERS)
            parts: list[str] = []
            if not (yield from source.balanced(parts.append, PYTHON_QUOTES)):
                raise NotACall
            arguments = keywords_to_json("".join(parts))
            source.begin(name)
            source.arguments(arguments)
            source.mark()
            if (yield from source.expect(",]")) == "]":
                break
        source.commit()
        yield from source.skip(END)
    except NotACall:
        source.back()
    yield from source.rest()


def keywords_to_json(text: str) -> str:
    """A JSON object from Python's keyword arguments in brackets, (a=1, b='x'). Raises NotACall for anything except
    literals."""
    source = _as_python(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes unknown to Python
            call = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACall
        named = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if None in named or len(named) < len(call.keywords):
            raise NotACall
        values = {str(name).removeprefix(PREFIX): value for name, value in named.items()}
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(values)
    except (ValueError, SyntaxError) as error:
        raise NotACall from error
    return written


def _as_python(text: str) -> str:
    """Keyword arguments for Python's parser: each name with PREFIX, since models also write names like `from`, and
    strings without line breaks.

    Raises NotACall for tokens that no literal contains, and for deep brackets.
    """
    at, depth = 0, 0
    parts: list[str] = []
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise NotACall
        word, at = token[0].strip(), token.end()
        depth += (word in ("(", "[", "{")) - (word in (")", "]", "}"))
        if depth > MOST_DEPTH:
            raise NotACall
        if depth == 1 and word[0] not in DELIMITERS and text.startswith("=", at):
            word = PREFIX + word
        elif word[-1] in PYTHON_QUOTES and _BREAKS.search(word):
            word = _without_breaks(word)
        parts.append(f"{word} ")
    return "".join(parts)


def _without_breaks(literal: str) -> str:
    """A string literal with escapes instead of line breaks. Line breaks after a backslash are removed, as in Python."""
    if literal[0].lower() == "r":  # a raw string: its backslashes are text
        quote, inside = literal[-1], literal[2:-1].replace("\\", "\\\\")
        literal = f"{quote}{inside.replace(quote, chr(92) + quote)}{quote}"
        return _BREAKS.sub(_escaped, literal)
    return _BREAKS.sub(_escaped, _CONTINUED.sub(r"\1", literal))


def _escaped(found: re.Match[str]) -> str:
    return found[0].replace("\r", "\\r").replace("\n", "\\n")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(set(names)) == len(keys):
                return dict(zip(names, map(_value, values), strict=True))
    raise NotACall


FORMATS = (
    CallFormat(
        "pythonic",
        "[NAME(KEY=VALUE, ...), ...]",
        parse,
        CallText("", "(", ")", begin="[", between=", ", end="]", arguments=KEYWORDS),
        begins=r"^\s*(<\|python_start\|>)?\s*\[\s*({names})\s*\(",
        tokens=TOKENS,
        signs=(("[func_name1(",), ("<|python_start|>",)),
    ),
)
