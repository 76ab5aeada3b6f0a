"""Grammars of rules as automata, against a matcher that tries everything."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_ebnf
from support.walks import Walker

from blinkpy.dpu.grammar.ebnf import ebnf_rules, ebnf_syntax
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.regex_syntax import MOST_COUNT, MOST_DEPTH

GRAMMARS = 150
LETTERS = 'ab-é😀"\n'
WRITTEN = {"a": ("a", r"\x61"), "b": ("b", r"\u0062"), "-": (r"\-", r"\x2d"), "é": ("é", r"\u00e9"), "😀": ("😀", r"\U0001F600")}
WRITTEN |= {'"': (r"\"", r"\x22"), "\n": (r"\n", r"\x0A")}
LAYERS = 2


class EbnfDraw:
    """Draws rules in layers: a rule uses those of later layers anywhere, those of its own one only at the end or only at the
    beginning. A node is (kind, ...): text, set, rule, all (a sequence), any (alternatives), times."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.layers = [[f"r{layer}-{i}" for i in range(rng.integers(1, 5))] for layer in range(LAYERS)]
        self.layers[0][0] = "root"
        self.rules: dict[str, Any] = {}
        for layer, names in enumerate(self.layers):
            self.later = [name for later in self.layers[layer + 1 :] for name in later]
            self.own, self.at_end = names, rng.random() < 0.5
            for name in names:
                ends = [self.node(1, False, False)] * (rng.random() < 0.8)  # else some fit nothing
                self.rules[name] = ("any", [self.node(2, True, True), self.node(2, True, True), *ends])

    def one(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def letters(self, most: int) -> str:
        return "".join(self.one(*LETTERS) for _ in range(self.rng.integers(0, most)))

    def node(self, depth: int, first: bool, last: bool) -> Any:
        """first, last: whether nothing stands before it in its rule, or behind it."""
        if (last if self.at_end else first) and self.rng.random() < 0.5:
            return ("rule", self.one(*self.own))
        if self.later and self.rng.random() < 0.25:
            return ("rule", self.one(*self.later))
        if not depth or self.rng.random() < 0.3:
            return ("text", self.letters(3)) if self.rng.random() < 0.6 else ("set", self.one("", "^"), self.letters(3) + "a")
        if self.rng.random() < 0.3:
            low, high = self.one((0, 1), (0, 1), (0, None), (1, None), (2, 2), (1, 3), (2, None))
            return ("times", self.node(depth - 1, first and high == 1, last and high == 1), low, high)
        if self.rng.random() < 0.4:
            return ("any", [self.node(depth - 1, first, last) for _ in range(self.rng.integers(2, 4))])
        count = self.rng.integers(2, 4)
        return ("all", [self.node(depth - 1, first and i == 0, last and i == count - 1) for i in range(count)])

    def written(self, node: Any) -> str:
        kind, inside, *more = node
        if kind in ("text", "set"):
            letters = "".join(self.one(*WRITTEN[letter]) for letter in (inside if kind == "text" else more[0]))
            return f'"{letters}"' if kind == "text" else f"[{inside}{letters}]"
        if kind == "rule":
            return inside
        if kind == "times":
            low, high = more
            signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (2, 2): "{2}"}
            counts = f"{{{low},{'' if high is None else high}}}"
            return f"({self.written(inside)}){self.one('', ' ')}{self.one(signs.get((low, high), counts), counts)}"
        between = self.one(" ", "\n  ", " # 'a remark' |\n") if kind == "all" else self.one(" | ", "\n | ", "|")
        return "(" + between.join(self.written(part) for part in inside) + ")"

    def grammar(self) -> str:
        names = list(self.rules)
        self.rng.shuffle(names)
        return "\n".join(f"{name} ::= {self.written(self.rules[name])}" for name in names)


def matches(rules: dict[str, Any], text: str) -> bool:
    """Whether root is the whole text: where each rule may end from each place, until nothing new is found."""
    places = range(len(text) + 1)
    found: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in places}

    def ends(node: Any, at: int) -> set[int]:
        kind, inside, *more = node
        if kind == "text":
            return {at + len(inside)} if text.startswith(inside, at) else set()
        if kind == "set":
            return {at + 1} if at < len(text) and (text[at] in more[0]) != (inside == "^") else set()
        if kind == "rule":
            return found[inside, at]
        if kind == "any":
            return set().union(*(ends(part, at) for part in inside))
        low, high = more if kind == "times" else (len(inside), len(inside))
        now, result = {at}, set()
        for count in itertools.count():
            result |= now if count >= low else set()
            if count == high:
                return result
            part = inside if kind == "times" else inside[count]
            now = set().union(*(ends(part, place) for place in now))
            if not now or (high is None and count >= low and now <= result):
                return result
        raise AssertionError

    while True:
        before = sum(map(len, found.values()))
        for name, at in found:
            found[name, at] |= ends(rules[name], at)
        if sum(map(len, found.values())) == before:
            return len(text) in found["root", 0]


def test_rules_match_what_they_say(rng: np.random.Generator) -> None:
    hits = misses = 0
    for _ in range(GRAMMARS):
        draw = EbnfDraw(rng)
        grammar = draw.grammar()
        samples = [draw.letters(6) for _ in range(15)]
        try:
            automaton = automaton_of_ebnf(grammar)
        except GrammarTooLargeError:  # some explode
            continue
        except GrammarError as error:
            if error.message != "Nothing fits the grammar.":
                raise
            assert not any(matches(draw.rules, text) for text in samples), grammar
            continue
        legal = [Walker(automaton).draw(rng, 8).decode() for _ in range(6)]
        for text in samples + legal + [text[1:] for text in legal] + [text[:-1] + "b" for text in legal]:
            if len(text) > 12:
                continue
            wanted = matches(draw.rules, text)
            hits, misses = hits + wanted, misses + (not wanted)
            assert automaton.accepts(text.encode()) == wanted, (grammar, text)
    assert min(hits, misses) > GRAMMARS


def test_recursion_in_the_middle_is_not_regular(rng: np.random.Generator) -> None:
    for _ in range(30):
        draw = EbnfDraw(rng)
        name = draw.one(*draw.rules)
        middle = draw.one(
            ("all", [("text", "a"), ("rule", name), ("text", "b")]),
            ("any", [("all", [("text", "a"), ("rule", name)]), ("all", [("rule", name), ("text", "b")])]),
            ("times", ("all", [("text", "a"), ("rule", name)]), 0, None),
            ("times", ("all", [("rule", name), ("text", "a")]), 1, 2),
            ("all", [("rule", name), ("rule", name)]),
        )
        draw.rules[name] = ("any", [draw.rules[name], middle])
        draw.rules["root" if name != "root" else "start"] = ("any", [draw.rules["root"], ("rule", name)])
        with pytest.raises(GrammarError, match=r"rule '[\w-]+' is not regular: .*, at line \d+, column \d+") as refused:
            automaton_of_ebnf(draw.grammar())
        layer = next(names for names in draw.layers if name in names)
        assert any(f"rule '{one}'" in refused.value.message for one in layer)


SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
CHESS = r"""
# moves, as they are noted
root ::= (
    # one pair of moves at least
    "1. " move " " move "\n"

    ([1-9] [0-9]? ". " move " " move "\n")*
)
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
# By the forms that the manuals of vLLM, xgrammar and llama.cpp show: what is accepted, and what is not.
EXAMPLES = [
    (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_1  from table_2  where col_2 = 3 ", "SELECT col_1"]),
    (CHESS, ["1. e4 e5\n", "1. exd8=Q O-O-O+\n2. Nf3 Rad1#\n"], ["1. e4\n", "2. e4 e5\n", "1. e9 e5\n"]),
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno"]),
    ('root ::= ("- " item)+\nitem ::= [^\\n]+ "\\n"', ["- a\n- é b\n"], ["- \n", "- a", ""]),
    ('root ::= [ぁ-ゟ]+ ([ \\t\\n] [ぁ-ゟ]+)*', ["ひらがな です"], ["カ", ""]),
    ('root ::= " "? ("-"? ([0-9] | [1-9] [0-9]{0,15}))', ["-12", " 0"], ["012", "-"]),
    ('root ::= "\\"" char{1,3} "\\""\nchar ::= [^"\\\\\\x7F\\x00-\\x1F] | [\\\\] (["\\\\bfnrt] | "u" [0-9a-fA-F]{4})',
     ['"ab\\u00e9"', '"\\n"'], ['""', '"\n"', '"\\q"', '"abcd"']),
    ('root ::= "[" space (int ("," space int)*)? "]"\nint ::= [0-9]+ space\nspace ::= | " " | "\\n" [ \\t]{0,2}',
     ["[]", "[ 1, 2\n\t]", "[\n  1]"], ["[,]", "[  1]"]),
    ("root ::= d{4} \"-\" d{2} \"-\" d{2}\nd ::= [0-9]", ["2024-01-31"], ["2024-1-31"]),
    ('root ::= digits\ndigits ::= [0-9] | [0-9] digits', ["1", "123"], ["", "1a"]),
    ('root ::= digits\ndigits ::= [0-9] | digits [0-9]', ["1", "123"], ["", "1a"]),
    ('root ::= list ";"\nlist ::= item | list ", " item\nitem ::= "x" item?', ["x;", "xx, x, xxx;"], [";", "x, ;", "x,x;"]),
    ('root ::= even\neven ::= "" | "a" odd\nodd ::= "a" even', ["", "aa", "aaaa"], ["a", "aaa"]),
    ('root ::= even "!"\neven ::= "" | odd "a"\nodd ::= even "a"', ["!", "aa!"], ["a!", "aaa!"]),
    ('root ::= "a" b* # end\nb ::= "b"# not " one\n', ["a", "abb"], ["b"]),
    ('root ::= a . b\na ::= "x"\n\nb\n::=\n"y"', ["xéy", "x\ny"], ["xy", "x--y"]),
    ('root ::= "a"\n | "b"\r\n | ("c" |\n "d")', ["a", "b", "c", "d"], ["ab", ""]),
    ('root ::= "a" # "b"\r"c"# "d"', ["ac"], ["abc"]),
    ('root ::= ""', [""], ["a"]),
    ('root ::= () "a"', ["a"], [""]),
    ('root::="a"{ 2 , }', ["aa", "aaa"], ["a"]),
    ('root ::= "a"{0}"b"{0,2}', ["", "bb"], ["a", "bbb"]),
    (r'root ::= "\x41\u00e9\U0001F600\a\b\t\n\v\f\r\e\0\'\?\\"', ["Aé😀\a\b\t\n\v\f\r\x1b\0'?\\"], ["A"]),
    (r"root ::= [\]\[\-^] [-a] [a-] [--/] [\d-] [\W]", ["]-a/5!", "^a-.-é"], ["]-a/5x", "a-a/5!"]),
    ('root ::= rule_1 rule-2 r3.x\nrule_1 ::= "1"\nrule-2 ::= "2"\nr3.x ::= "3"', ["123"], ["12"]),
    ('root ::= "a"\nunused ::= "(" unused ")"', ["a"], ["()"]),
    (r'root ::= "\ud7ff\ue000" [\U0010ffff]', ["\ud7ff\ue000\U0010ffff"], ["\ud7ff"]),
    ('root ::= "::=" # not a rule: x ::= "y"', ["::="], ["y"]),
    ('root ::= (("a" | "") "b")? ("c" | root2)\nroot2 ::= "d" root2 | "e"', ["bc", "abddde", "e"], ["ac", "abd"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "legal", "others"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_forms_of_manuals(grammar: str, legal: list[str], others: list[str]) -> None:
    automaton = automaton_of_ebnf(grammar)
    assert [text for text in legal if not automaton.accepts(text.encode())] == []
    assert [text for text in others if automaton.accepts(text.encode())] == []


def test_the_manuals_example() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text().partition("## What a grammar means")[2]
    automaton = automaton_of_ebnf("\n".join(re.findall("^    (.*)", page.partition("## ")[0], re.MULTILINE)))
    assert [automaton.accepts(text) for text in (b'ab, "", 12, "c\nd".', b"a, b, c, d, e", b"a,b", b'"\\"')] == [
        True,
        True,
        False,
        False,
    ]


EXPRESSION = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
DEEP = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(500)) + '\nr500 ::= "a"\nroot ::= r0'
DEEP_CIRCLES = (
    "\n".join(f's{i} ::= "a" r{i} | r{i + 1} "b"\nr{i} ::= "a" s{i}' for i in range(400)) + '\nr400 ::= "a"\nroot ::= r0'
)
BAD = [
    ('?start: "a" | b\nb: /c/', "GBNF.*Lark", 1, 1),
    ("", "there is no rule", 1, 1),
    ('start ::= "a"', "no rule 'root'", 1, 1),
    ('root ::= "a"\n  | b', "no rule 'b'", 2, 5),
    ('root ::= "a"\nother ::= [a-z] c', "no rule 'c'", 2, 17),
    ('root ::= "a"\nother ::= ("b"', r"this '\(' has no '\)'", 2, 11),
    ('root ::= ("a"\nother ::= "b"', r"this '\(' has no '\)'", 1, 10),
    ('root ::= "a")', "'\\)' does not belong here", 1, 13),
    ('root ::= "a"\nroot ::= "b"', "rule 'root' is there twice", 2, 1),
    ('root ::=\nother ::= "b"', "rule 'root' is empty", 1, 1),
    ("root ::= []", "a class needs characters", 1, 10),
    ("root ::= [^]", "a class needs characters", 1, 10),
    (r"root ::= [^\x00-\U0010FFFF]", "no character is in this class", 1, 10),
    ("root ::= [b-a]", "a range is in the wrong order", 1, 11),
    (r"root ::= [a-\d]", r"\\d is not supported", 1, 13),
    ("root ::= [a\n]", "a class has to end on its line", 1, 10),
    ('root ::= "a\n"', "a literal has to end on its line", 1, 10),
    ('root ::= "a\\"', "a literal has to end on its line", 1, 10),
    ("root ::= 'a'", "double quotes", 1, 10),
    ("root ::= <think>", "single tokens", 1, 10),
    ("root ::= !<think>", "single tokens", 1, 10),
    (r'root ::= "\q"', r"\\q is not supported", 1, 11),
    (r'root ::= "\d"', r"\\d is not supported", 1, 11),
    (r'root ::= "é\x4"', r"\\x needs 2 hexadecimal digits", 1, 12),
    (r'root ::= "\ud83d\ude00"', "this is no character", 1, 11),
    (r'root ::= "\U00110000"', "this is no character", 1, 11),
    (r'root ::= "\ud800"', "this is no character", 1, 11),
    (r'root ::= [\udfff]', "this is no character", 1, 11),
    ("\nroot ::= b", "no rule 'b'", 2, 10),
    ("root ::= \"\ud800\"", "this is no character", 1, 11),
    ("root ::= * \"a\"", "nothing to repeat", 1, 10),
    ('root ::= "a"+?', "nothing to repeat; .* brackets", 1, 14),
    ('root ::= "a"{2}{3}', "nothing to repeat", 1, 16),
    ('root ::= "a"{,3}', "counts are", 1, 13),
    ('root ::= "a"{3,2}', "the counts are in the wrong order", 1, 13),
    ('root ::= "a"{10001}', "10000 at most", 1, 13),
    ('root ::= "a"{1,10001}', "10000 at most", 1, 13),
    ('root ::= "a"; b ::= "b"', "';' means nothing", 1, 13),
    ('root = "a"\nb ::= "b"', "'=' means nothing", 1, 6),
    ('"root" ::= "a"', "a rule's name has to stand here", 1, 1),
    ('root "a"\nb ::= "b"', "'::=' has to follow 'root'", 1, 1),
    (EXPRESSION, "rule 'term' is not regular: .* only as their last thing", 1, 20),
    ("root ::= " + "(" * 51 + '"a"' + ")" * 51, "more than 50 nested groups", 1, 60),
    (DEEP_CIRCLES, "more than 400 levels", 601, 1),
    (DEEP, "more than 400 levels", 368, 1),
    ("root ::= " + '"a" ' * 25_001, "may have 100000 characters", 1, 100_001),
    ("\n".join(f'r{i} ::= "a"' for i in range(1001)), "may have 1000 rules", 1001, 1),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "message", "line", "column"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_refused_with_its_place(grammar: str, message: str, line: int, column: int) -> None:
    with pytest.raises(GrammarError, match=rf"^EBNF: .*{message}.*, at line {line}, column {column}\.$"):
        automaton_of_ebnf(grammar)


SIZES = [
    (lambda n: 'root ::= "a"' + " " * (n - 12), ebnf_syntax.MOST_LENGTH),
    (lambda n: "root ::= " + "\n".join(f'r{i}\nr{i} ::= "a"' for i in range(n - 1)), ebnf_syntax.MOST_RULES),
    (lambda n: f"root ::= {'(' * n}{')' * n}", MOST_DEPTH),
    (lambda n: f'root ::= "a"{{{n}}}', MOST_COUNT),
    (lambda n: f'root ::= "a"{{{n},}}', MOST_COUNT),
    (lambda n: f'root ::= "a"{{0,{n}}}', MOST_COUNT),
]


@pytest.mark.parametrize(("written", "most"), SIZES, ids=range(len(SIZES)))
def test_each_size_has_a_bound(written: Callable[[int], str], most: int) -> None:
    ebnf_syntax.parse_ebnf(written(most))
    with pytest.raises(GrammarError, match=str(most)):
        ebnf_syntax.parse_ebnf(written(most + 1))


# What a rule may be, and its levels, its own included. A rule around it that is nothing else has two more, a repetition one more.
LEVELS = [('"a"', 2), ("()", 2), ("[ab]", 2), ('"a"?', 3), ('"a" "b"', 3), ('"a" | "b"', 3), ('("a"+)?', 4), ('"a" "b"+', 4)]


@pytest.mark.parametrize(("rule", "levels"), LEVELS)
def test_the_levels_of_each_kind_count(rule: str, levels: int) -> None:
    around, more = divmod(ebnf_rules.MOST_HEIGHT - levels, 2)
    rule = f"({rule})?" if more else rule
    above = "".join(f"r{i}\nr{i} ::= " for i in range(around))
    ebnf_rules.ebnf_piece(f"root ::= {above}{rule}")
    with pytest.raises(GrammarError, match=f"rule 'root' has more than {ebnf_rules.MOST_HEIGHT} levels"):
        ebnf_rules.ebnf_piece(f"root ::= {above}({rule})?")


@pytest.mark.parametrize("height", [20, 21, 22])
def test_a_rule_that_leads_to_itself_has_the_height_of_its_body(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    """Its name counts there as a terminal does, for it adds no levels."""

    def wraps(inner: str) -> int:
        """How often alternatives can be put around it."""
        for n in range(height):
            try:
                ebnf_rules.ebnf_piece(f"root ::= {inner}")
            except GrammarError:
                return n
            inner = f'"a" ({inner} | "b")'
        return height

    monkeypatch.setattr(ebnf_rules, "MOST_HEIGHT", height)
    assert height > wraps('"c" "d"') == wraps('"c" root') > 2


DOUBLING = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(100)) + '\nr100 ::= "a"\nroot ::= r0'
EXPLODING = [
    DOUBLING,
    DOUBLING.replace('"a"', '""'),
    'root ::= ((("a"{9999}){9999}){9999}){9999}',
    'root ::= ("a" | "b")* "a" ("a" | "b"){30}',
    'root ::= "' + "a" * 90_000 + '"',
    "root ::= " + "[^a]" * 24_000,
]


@pytest.mark.parametrize("grammar", EXPLODING, ids=range(len(EXPLODING)))
def test_what_explodes_is_too_large(grammar: str) -> None:
    with pytest.raises(GrammarTooLargeError):
        automaton_of_ebnf(grammar)


def test_many_rules_that_lead_to_each_other_stay_one_automaton() -> None:
    """A state for each remainder of a binary number; a rule is built once there, however often it is used."""
    count = ebnf_syntax.MOST_RULES - 1
    rules = [f'r{i} ::= "0" r{2 * i % count} | "1" r{(2 * i + 1) % count}' for i in range(count)]
    automaton = automaton_of_ebnf("\n".join([rules[0] + ' | ""', *rules[1:], "root ::= r0"]))
    assert automaton.states == count
    for number in (0, count, 7 * count, count * count, 1, count + 1, 10 * count + 5):
        assert automaton.accepts(f"{number:b}".encode()) == (number % count == 0)


@pytest.mark.parametrize("use", ["root?", "(root)?", "root"])
def test_an_optional_rule_in_the_middle_is_neither_first_nor_last(use: str) -> None:
    with pytest.raises(GrammarError, match="not regular"):
        automaton_of_ebnf(f'root ::= "a" {use} "b" | "c"')
