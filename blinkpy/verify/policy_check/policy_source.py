"""What a policy's source says before anything of it runs: Python that device code has no word for, imports, hidden state.

Only the policy's function and the functions of the same file that it calls are held to the rules of device code. What
passes here is compiled afterwards; this pass exists to name the line, and the reason in the user's words.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from blinkpy.scheduler.policy_language import NOT_IN_A_POLICY
from blinkpy.verify.policy_check.divisors import doubtful_divisors
from blinkpy.verify.policy_check.findings import Finding

PART = "source"

# Modules whose import a policy may have for its own sake: annotations, or to be called by tests.
USUAL_IMPORTS = frozenset({"__future__", "typing", "numba", "math", "blinkpy"})


def read_source(path: Path, name: str) -> list[Finding]:
    """Findings about the function `name` of a policy file, which must exist."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        return [Finding("error", PART, error.msg, error.lineno or 0)]
    except (UnicodeDecodeError, ValueError) as error:
        return [Finding("error", PART, f"not a Python file: {error}")]
    except OSError as error:
        return [Finding("error", PART, f"can't be read: {error.strerror}")]
    findings = list(_imports(tree))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name in functions:
        mutable = _mutable_names(tree)
        for function in _reached(functions, name):
            findings += _broken_rules(function, mutable)
            for divisor in doubtful_divisors(tree, function):
                text = f"{function.name} divides by {ast.unparse(divisor)}, which may be 0: such a request would be served last"
                findings.append(Finding("warning", PART, text, divisor.lineno))
    return findings


def _imports(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        else:
            continue
        for name in names:
            if name.split(".")[0] not in USUAL_IMPORTS:
                text = f"imports {name}, which a rank can't use; its code runs in the engine's process at every start"
                yield Finding("warning", PART, text, node.lineno)


def _reached(functions: dict[str, ast.FunctionDef], name: str) -> list[ast.FunctionDef]:
    """The function and those of the same file that it calls, directly or not."""
    reached, open_ = [name], [name]
    while open_:
        for node in ast.walk(functions[open_.pop()]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = node.func.id
                if called in functions and called not in reached:
                    reached.append(called)
                    open_.append(called)
    return [functions[each] for each in reached]


def _mutable_names(tree: ast.Module) -> set[str]:
    """Names of the module that hold something which can change: a list, a dictionary, a set, an array, an object."""
    names = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = getattr(node, "value", None)
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call):
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _broken_rules(function: ast.FunctionDef, mutable: set[str]) -> Iterator[Finding]:
    """What a function's body does that device code can't; once each, mutable names that it reads, and floats."""
    unseen, floats = set(mutable), False
    for node in (node for statement in function.body for node in ast.walk(statement)):
        line = getattr(node, "lineno", 0)
        for what, kinds in NOT_IN_A_POLICY.items():
            if isinstance(node, kinds):
                yield Finding("error", PART, f"{function.name} uses {what}; device code has none", line)
        if isinstance(node, ast.Name) and node.id in unseen:
            unseen.remove(node.id)
            text = f"{function.name} reads {node.id}, which can change; the compiled rank keeps the value of the engine's start"
            yield Finding("warning", PART, text, line)
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        if not floats and (divides or (isinstance(node, ast.Constant) and isinstance(node.value, float))):
            floats = True
            text = f"{function.name} computes with floats, which round: ranks that should differ may come out equal"
            yield Finding("warning", PART, text, line)
