"""Objects, arrays and their separators as pieces. At most one space follows a comma or a colon; there is no other
space."""

from typing import NamedTuple

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.nfa_nodes import ByteNfa
from blinkpy.dpu.grammar.byte_nfa import Piece

SPACE = byte_nfa.repeat(byte_nfa.literal(b" "), 0, 1)
COMMA = byte_nfa.sequence(byte_nfa.literal(b","), SPACE)
COLON = byte_nfa.sequence(byte_nfa.literal(b":"), SPACE)


class Member(NamedTuple):
    """A member of an object: `key` with its quotes."""

    key: Piece
    value: Piece
    required: bool = False


def object_of(named: list[Member], others: list[Member], least: int = 0, most: int | None = None) -> Piece:
    """An object with members of these names, in this order, then any further members. least, most: number of members."""
    counts = max(1, least) if most is None else most

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        first = nfa.node()
        nfa.edges[source].append((0x7B, 0x7B, first))
        at = {0: first}  # nodes before a member, by the number of members so far (up to counts)

        def write(member: Member, entries: dict[int, int], exits: dict[int, int]) -> None:
            """Add one member, from the start of its key. The nodes are indexed by the number of members, this member included."""
            for count, entry in entries.items():
                colon = nfa.node()
                value = nfa.node()
                member.key(nfa, entry, colon)
                COLON(nfa, colon, value)
                member.value(nfa, value, exits.setdefault(count, nfa.node()))

        def with_comma(at: dict[int, int]) -> dict[int, int]:
            """Nodes before a key, indexed by the number of members, including the key's own."""
            entries: dict[int, int] = {}
            for count, node in at.items():
                if most is not None and count >= most:
                    continue
                entry = entries.setdefault(min(count + 1, counts), nfa.node())
                (COMMA if count else byte_nfa.empty)(nfa, node, entry)
            return entries

        for member in named:
            exits: dict[int, int] = {}
            write(member, with_comma(at), exits)
            if not member.required:
                for count, node in at.items():
                    nfa.link(node, exits.setdefault(count, nfa.node()))
            at = exits
        if others:
            exits = {}
            for count in list(at):
                exits.setdefault(min(count + 1, counts), nfa.node())
            for count in range(1, counts + 1):
                exits.setdefault(count, nfa.node())
            for count, node in at.items():
                nfa.link(node, exits.setdefault(count, nfa.node()))
            entries = with_comma(exits)
            for member in others:
                write(member, entries, exits)
            at = exits
        for count, node in at.items():
            if count >= least:
                nfa.edges[node].append((0x7D, 0x7D, target))

    return add


def array_of(first: list[Piece], others: Piece, least: int = 0, most: int | None = None) -> Piece:
    """An array with the first items, then any number of further items. least, most: number of items."""
    counted = max(least, len(first)) if most is None else most

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        node = nfa.node()
        nfa.edges[source].append((0x5B, 0x5B, node))
        for index in range(counted):
            item = first[index] if index < len(first) else others
            if index >= least:
                nfa.edges[node].append((0x5D, 0x5D, target))
            begin, following = nfa.node(), nfa.node()
            (COMMA if index else byte_nfa.empty)(nfa, node, begin)
            item(nfa, begin, following)
            node = following
        nfa.edges[node].append((0x5D, 0x5D, target))
        if most is None and others is not byte_nfa.nothing:
            begin, following = nfa.node(), node if counted else nfa.node()
            if not counted:  # the first item has no comma before it
                nfa.link(node, begin)
                nfa.edges[following].append((0x5D, 0x5D, target))
            others(nfa, begin, following)
            COMMA(nfa, following, begin)

    return add


def set_of(items: list[Piece], least: int = 0, most: int | None = None) -> Piece:
    """An array with some of the items, in this order, each at most once. least, most: number of items."""
    counts = max(1, least) if most is None else min(most, len(items))

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        first = nfa.node()
        nfa.edges[source].append((0x5B, 0x5B, first))
        at = {0: first}  # nodes after an item, by the number of items so far (up to counts)
        for item in items:
            following: dict[int, int] = {}
            for count, node in at.items():
                nfa.link(node, following.setdefault(count, nfa.node()))
                if most is None or count < most:
                    begin = nfa.node()
                    (COMMA if count else byte_nfa.empty)(nfa, node, begin)
                    item(nfa, begin, following.setdefault(min(count + 1, counts), nfa.node()))
            at = following
        for count, node in at.items():
            if count >= least:
                nfa.edges[node].append((0x5D, 0x5D, target))

    return add
