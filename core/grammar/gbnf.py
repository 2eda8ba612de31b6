"""Translating grammars from GBNF to Lark's notation.

Owns what the library's translation lacks: names that Lark does not accept, escapes, control
characters, operators inside classes, repeated repetitions, and keeping each rule at its line and
column, so that errors refer to the original.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Final

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    resolve,
)

from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption

_RULE: Final = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=[ \t]*", re.MULTILINE)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SIGN: Final = re.compile(r"[\x00-\x1f\x7f&~^-]")
"""Characters that mean something else in a class of a regular expression."""
_CLASS_ITEM: Final = re.compile(r"(\\x..|\\?.)(?:-(\\x..|\\?.))?", re.DOTALL)
_ANY_CHARACTER: Final = "(?s:.)"
_NEW_LINE: Final = re.compile(r"\r\n?")
_ROOT, _START = "root", "start"
"""The start rule in GBNF and in Lark."""
_MESSAGES: Final[Mapping[str, str]] = {
    "Expected name": "a rule begins with its name and ::= (a | stands at the end of a line, texts"
    " in double quotes)",
    "Unexpected end of input": "a text or a class of characters does not end",
}
"""Replacements for messages of the library's translation."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar has a rule with GBNF's `::=`."""
    return _RULE.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Translate `text` to Lark. Raises `InvalidRequest`, `UnsupportedOption`, with the place."""
    text = _NEW_LINE.sub("\n", text)
    try:
        rules = GrammarParser().parse(_ESCAPE.sub(_character, text))
        places = dict(_places(text))
        placed = sorted(((places.get(name, (1, 1)), rules[name]) for name in rules), key=_place)
        _check_names(rules)
        resolve(_rename_rules(rules))
        _wrap_repetitions(rules.values())
        return _render(placed)
    except GbnfToLarkError as error:
        raise _read_error(error) from error
    except IndexError as error:  # of the library, past the end of the text
        raise InvalidRequest("The grammar cannot be read: it ends with half an escape.") from error
    except RequestError:
        raise
    except ValueError as error:  # of int()
        raise InvalidRequest("The grammar cannot be read: a repetition is no number.") from error
    except RecursionError as error:
        raise InvalidRequest("The grammar cannot be read: it is nested too deeply.") from error


def _place(placed: tuple[tuple[int, int], RuleNode]) -> tuple[int, int]:
    return placed[0]


def _character(escape: re.Match[str]) -> str:
    """The escaped character, or the form of escape that the library accepts everywhere."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise InvalidRequest(
            f"The grammar cannot be read: {escape[0]} at"
            f" {_location(escape.string, escape.start())} is no character."
        )
    return rf"\x{code:02x}" if code < 0x80 else chr(code)


def _location(text: str, position: int) -> str:
    before = text[:position]
    return f"line {before.count(chr(10)) + 1}, column {position - before.rfind(chr(10))}"


def _read_error(error: GbnfToLarkError) -> InvalidRequest | UnsupportedOption:
    spot = _location(error.pos.text, error.pos.pos)
    if error.pos.current() == "<" or error.pos.peek(2) == "!<":
        return UnsupportedOption(
            f"Special tokens are not offered in grammars ({spot}): write text in quotes."
        )
    words = str(error).removesuffix(f" at {error.pos}")
    words = _MESSAGES.get(words, words[:1].lower() + words[1:])
    return InvalidRequest(f"The grammar cannot be read at {spot}: {words}.")


def _places(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The line of each rule, and the column in which its body begins."""
    line, begin = 1, 0
    for found in _RULE.finditer(text):
        line += text.count("\n", begin, found.start())
        begin = found.start()
        yield found[1], (line, found.end() - text.rfind("\n", 0, begin + 1))


def _nodes(rule: RuleNode) -> Iterator[ASTNode]:
    nodes: list[ASTNode] = [rule]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children()


def _check_names(rules: Mapping[str, RuleNode]) -> None:
    if _ROOT not in rules:
        raise InvalidRequest(
            f"The grammar has no rule {_ROOT}, with which an answer begins: add it."
        )
    for rule in rules.values():
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode) and node.name not in rules:
                raise InvalidRequest(
                    f"The rule {rule.name[:80]} of the grammar names {node.name[:80]}, which is"
                    " not defined."
                )


def _rename_rules(rules: Mapping[str, RuleNode]) -> dict[str, RuleNode]:
    """The rules with names and texts that Lark accepts."""
    names = {_ROOT: _ROOT}
    taken = {_ROOT, _START}
    for name in rules:
        if name not in names:
            names[name] = _free_name(name, taken)
            taken.add(names[name])
    for rule in rules.values():
        for node in _nodes(rule):
            if isinstance(node, RuleNode | RuleRefNode):
                node.name = names[node.name]
            elif isinstance(node, LiteralNode):
                node.value = _CONTROL.sub(_escaped, node.value)
            elif isinstance(node, RegexNode):
                node.rx = _ANY_CHARACTER if node.rx == "." else _class(node.rx)
    return {rule.name: rule for rule in rules.values()}


def _wrap_repetitions(rules: Iterable[RuleNode]) -> None:
    """Put a repetition that is repeated in parentheses, which the library leaves out."""
    for rule in rules:
        for node in _nodes(rule):
            if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
                node.node = AlternativeNode([node.node])


def _class(text: str) -> str:
    """A class of characters without the operators that only regular expressions have in it."""
    begin = 2 if text.startswith("[^") else 1
    return f"{text[:begin]}{_CLASS_ITEM.sub(_class_item, text[begin:-1])}]"


def _class_item(item: re.Match[str]) -> str:
    return "-".join(_SIGN.sub(_escaped, each) for each in item.groups() if each)


def _escaped(control: re.Match[str]) -> str:
    return rf"\x{ord(control[0]):02x}"


def _free_name(name: str, taken: set[str]) -> str:
    """An unused Lark name for a rule, close to what the library would write."""
    plain = re.sub(r"[^a-z0-9]", "_", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    if not plain[0].isalpha():
        plain = f"rule_{plain}"
    numbered = (f"{plain}_{number}" for number in count(len(taken)))
    return plain if plain not in taken else next(each for each in numbered if each not in taken)


def _render(placed: list[tuple[tuple[int, int], RuleNode]]) -> str:
    """The text of the rules, each on its line, with its body in its column."""
    lines: list[str] = []
    for (line, column), rule in placed:
        lines += [""] * (line - len(lines) - 1)
        body = rule.alternatives.top_str().replace("\n     | ", " | ")
        lines.append(f"{rule.name}:{' ' * max(1, column - len(rule.name) - 2)}{body}")
    return "\n".join(lines)
