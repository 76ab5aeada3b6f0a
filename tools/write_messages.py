"""Write docs/messages.md: every error text, refusal and log line that a user can meet, collected from the source."""

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "messages.md"
HEAD = """\
# Messages

For users, and for authors of messages. `make docs` collects this page from the source; the help of options is in
[cli.md](cli.md). Names in braces stand for values. Each message states the problem, its place, and the remedy.
"""
SECTIONS = {
    "options": "Options, models and files: one line on standard error, exit code 2",
    "http": "HTTP: the `message` of an error object",
    "run": "Failures at run time: the log, or one line on standard error and exit code 1",
    "log": "Log lines",
}
# Functions and exceptions that take a message for a user, by section. The longest string among the arguments is the message.
TAKERS = {
    "options": ("ConfigError", "PolicyError", "section.error", "group.error"),
    "http": (
        *("ApiError", "bad_request", "unavailable", "busy", "ChatError", "GrammarError", "GrammarTooLargeError"),
        *("GrammarTooSlowError", "GrammarTooHeavyError", "_stop", "_invalid", "_refuse", "refuse", "EngineUnavailableError"),
        *("fault", "self.error", "_grammar_field"),
    ),
    "run": (
        *("TransportError", "HandshakeError", "EngineLostError", "RecordingError", "BrokenRecordError", "ChildError"),
        *("NoSpaceError", "FenceError", "LayoutError", "StuckError", "RuntimeError", "SystemExit", "print_error", "refusal"),
        *("NoContinuationError", "Finding", "TimeoutError", "BrokenStateError"),
    ),
    "log": ("logger.info", "logger.warning", "logger.error", "logger.exception", "logger.critical"),
}
SUBJECTS = {"fault": "'{keyword}' "}  # added by a function in front of its message
SECTION_OF = {taker: section for section, takers in TAKERS.items() for taker in takers}
# Folders whose messages no user meets: the verification of the scheduler itself, and code that runs on the device.
INTERNAL = ("verify/sim", "verify/oracle", "device/", "scheduler/phases", "kv/invariants", "dpu/http/fields/field.py")


class Message(NamedTuple):
    section: str
    folder: str  # below blinkpy/
    text: str


def messages_of(source: str, folder: str) -> Iterator[Message]:
    """The messages of one module, in its order."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            local = {
                target.id: node.value
                for node in own_nodes(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in own_nodes(function):
                if isinstance(node, ast.Call) and (section := section_of(node, folder)):
                    texts = [" ".join(text.split()) for argument in arguments(node) for text in texts_of(argument, local)]
                    subject = subject_of(node, local)
                    yield from (Message(section, folder, subject + text) for text in texts if " " in text)


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, in order, without those of functions within it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)


def section_of(call: ast.Call, folder: str) -> str | None:
    """The section of a call's message, or None if it takes none."""
    name = ast.unparse(call.func)
    if name == "self.error" and not folder.startswith("dpu"):
        return "options"
    return SECTION_OF.get(name) or SECTION_OF.get(name.rpartition(".")[2])


def subject_of(call: ast.Call, local: dict[str, ast.expr]) -> str:
    """The text that a function puts in front of its message, or the name of a check."""
    name = ast.unparse(call.func)
    if name == "Finding" and len(call.args) > 2:
        return next((f"{text}: " for text in texts_of(call.args[1], local)), "")
    return SUBJECTS.get(name, "")


def arguments(call: ast.Call) -> list[ast.expr]:
    """The arguments that may be the message, without values of a log line."""
    name = ast.unparse(call.func)
    if name.startswith("logger.") or name == "Finding":
        return call.args[:1] if name != "Finding" else call.args[2:]
    named = [keyword.value for keyword in call.keywords if keyword.arg not in ("code", "limit", "param", "kind")]
    return [*call.args, *named]


def texts_of(node: ast.expr, local: dict[str, ast.expr]) -> list[str]:
    """The message in an expression, or both of a conditional expression, or an empty list."""
    if isinstance(node, ast.IfExp):
        return [*texts_of(node.body, local), *texts_of(node.orelse, local)]
    if isinstance(node, ast.Name) and node.id in local:
        return texts_of(local[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(map(part_of, node.values))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = texts_of(node.left, local) or ["{...}"], texts_of(node.right, local) or ["{...}"]
        return [left + right for left in sides[0] for right in sides[1]]
    return []


def part_of(node: ast.expr) -> str:
    """A part of an f-string: literal text unchanged, a value by its name in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    inner = node.value
    if isinstance(inner, ast.Call) and inner.args and isinstance(inner.func, ast.Attribute) and inner.func.attr == "join":
        inner = inner.args[0]
    if isinstance(inner, ast.Attribute):
        return "{" + inner.attr.lower().strip("_") + "}"
    return "{" + (inner.id.lower() if isinstance(inner, ast.Name) else "...") + "}"


def all_messages() -> list[Message]:
    found = dict[Message, None]()
    for path in sorted((ROOT / "blinkpy").rglob("*.py")):
        name = path.relative_to(ROOT / "blinkpy").as_posix()
        if not name.startswith(INTERNAL):
            found |= dict.fromkeys(messages_of(path.read_text(), name.rpartition("/")[0]))
    return list(found)


def page() -> str:
    lines = [HEAD]
    for section, title in SECTIONS.items():
        lines.append(f"\n## {title}\n")
        chosen = sorted((m for m in all_messages() if m.section == section), key=lambda m: m.folder)
        for folder, group in groupby(chosen, key=lambda m: m.folder):
            lines.append(f"\n`blinkpy/{folder}`\n\n".replace("/`", "`"))
            lines.extend(f"- {m.text}\n" for m in group)
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
