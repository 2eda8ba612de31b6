"""What is wrong with a grammar is said in plain words, with its line and column."""

from __future__ import annotations

import pytest

from support.guided import COMPILER
from triptych.core.errors import RequestError
from triptych.core.grammar.constraint import ConstraintKind
from triptych.core.grammar.refusals import is_about_size, refusal, sort_of
from triptych.core.grammar.source import to_grammar


def message(kind: ConstraintKind, text: str, around: str = "") -> str:
    with pytest.raises(RequestError) as raised:
        COMPILER.compile(to_grammar(kind, text, around))
    return raised.value.message


@pytest.mark.parametrize(
    ("grammar", "words", "place"),
    [
        ("start: x", "names x, which it does not define", "line 1, column 8"),
        ('start: "a" b\nb: FOO', "names FOO, which it does not", "line 2, column 4"),
        ('start: x\nx: "a"\nx: "b"', "defines x twice", "line 3, column 4"),
        ('start: A\nA: "a"\nA: "b"', "defines A twice", "line 3, column 4"),
        ("start: A\nA: B\nB: A", "terminal A of the grammar is defined by itself", "line 3, c"),
        ('start: ("a"', 'has "\\n" where ")" belongs', "line 1, column 12"),
        ('start: x\nx = "a"', 'has "=" where ":" belongs', "line 2, column 3"),
        ('start: "a")', 'has ")" where a name, a text', "line 1, column 11"),
        ("start: ~", "where a name, a text", "line 1, column 9"),
        ("start: 'a'", "texts stand in double quotes", "line 1, column 8"),
        (r'start: "\q"', "the escapes of JSON", "line 1, column 10"),
        ('start: x\nx: "a"{3,2}', "repetition that ends before it begins: {3, 2}", "line 2"),
        ("start: x\nx: /a(/", "expression a( cannot be read: unclosed group, at its ch", "line 2"),
        ("start: x\nx: /a(?!b)/", "look-around, including", "line 2, column 4"),
        ("start: x\nx: /\\bb/", r"expression \bb has a word boundary", "line 2, column 4"),
        ("%import common.FOO\nstart: FOO", "imports common.FOO, which is not", "line 1, column 1"),
        ("start: x\nx: " + '"a" ' * 60_000, "too large to be compiled", "line 2, column 4"),
        ("start: @foo", "names @foo, but other grammars", ""),
        ('root: "a"', "no rule start, with which an answer begins", ""),
        ("start: start", "no answer at all", ""),
    ],
)
def test_larks_faults_are_named_with_their_places(grammar: str, words: str, place: str) -> None:
    found = message("grammar", grammar)
    assert words in found
    assert f" The cause is at {place}" in found if place else "The cause" not in found
    assert len(found) < 400


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("ab(", "ab( cannot be read: unclosed group, at its character 3."),
        ("a\n(b", "unclosed group, at its character 4."),
        ("[z-a]", "the start must be <= the end, at its character 2."),
        ("x" * 500 + "(" + "y" * 500, "unclosed group, at its character 501."),
        (r"a\b", r"expression a\b has a word boundary, or looks around: write it without."),
    ],
)
def test_a_regular_expression_is_named_without_a_line_of_ours(pattern: str, words: str) -> None:
    found = message("regex", pattern)
    assert words in found
    assert "line" not in found
    assert len(found) < 400


def test_a_schema_around_which_we_wrote_a_grammar_has_no_line_of_ours() -> None:
    assert "line" not in message("json_schema", '{"type": "strin"}', 'start: "x" @form')
    assert "line" not in message("grammar", 'start: %json {"type": "strin"}')


def test_complaints_of_a_kind_are_the_same_whatever_they_name() -> None:
    reasons = ["Unsatisfiable schema: schema is false", "Unsatisfiable schema: minimum (5) is x"]
    assert sort_of(reasons[0]) == sort_of(reasons[1]) != sort_of("Invalid type: x")
    assert sort_of("what no one knows") != sort_of("what else no one knows")
    assert is_about_size("schema too large")
    assert not is_about_size(reasons[0])


def test_a_failure_of_the_library_is_no_text_for_callers() -> None:
    found = refusal("panic at 'index out of bounds', src/x.rs:3", "#/a").message
    assert "src" not in found
    assert found.endswith("The cause is at #/a.")
