"""JSON Schema's test suite against the automata: counts refused schemas and accepted documents.

    python tools/json_schema_suite.py FOLDER/tests/draft2020-12

FOLDER is a copy of github.com/json-schema-org/JSON-Schema-Test-Suite. The automaton may reject a valid
document, since each value has one form (docs/structured-output.md). If it accepts an invalid document,
the exit code is 1.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.queues.byte_automaton import ByteAutomaton


def main(folder: Path) -> int:
    """Print a line for each file, and the sums. Returns the exit code."""
    sums = Counter[str]()
    for path in sorted(
        (*folder.glob("*.json"), *folder.glob("optional/format/*.json"), folder / "optional" / "ecmascript-regex.json")
    ):
        counts = Counter[str]()
        for group in json.loads(path.read_text()):
            counts += of_group(group)
        print(f"{path.stem:24}", *(f"{name} {counts[name]:4}" for name in ("refused", "accepted", "missed", "kept out", "wrong")))
        sums += counts
    print(dict(sums))
    return 1 if sums["wrong"] else 0


def of_group(group: dict[str, Any]) -> Counter[str]:
    """Counts of one schema's documents, by outcome."""
    counts = Counter[str]()
    automaton: ByteAutomaton | None = None
    try:
        automaton = automaton_of_grammar({"schema": group["schema"]})
    except GrammarError as error:
        if "contradict" not in error.message:
            return Counter({"refused": len(group["tests"])})
    for test in group["tests"]:
        form = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        accepted = automaton is not None and automaton.accepts(form)
        counts[("accepted" if accepted else "missed") if test["valid"] else ("wrong" if accepted else "kept out")] += 1
        if accepted and not test["valid"]:
            print("wrong:", group["description"], "|", test["description"], form.decode())
    return counts


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
