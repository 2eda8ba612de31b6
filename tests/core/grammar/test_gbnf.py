"""GBNF: names, escapes and places that the library's translation leaves out."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.guided import COMPILER, ids_of
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.grammar.gbnf import gbnf_to_lark, is_gbnf
from triptych.core.grammar.source import to_grammar


def takes(grammar: str, text: str) -> bool:
    matcher = COMPILER.compile(to_grammar("grammar", grammar))
    ids = ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= start\nstart ::= "a"', "a"),
        ('start ::= "a" end\nroot ::= start\nend ::= "b"', "ab"),
        ('root ::= Start START\nStart ::= "a"\nSTART ::= "b"', "ab"),
        ('root ::= a-b a_b "c" root?\na-b ::= "a"\na_b ::= "b"', "abc"),
        ('root ::= Foo foo FOO\nFoo ::= "x"\nfoo ::= "y"\nFOO ::= "z"', "xyz"),
        ('root ::= 1a -b _c\n1a ::= "1"\n-b ::= "2"\n_c ::= "3"', "123"),
        ('root ::= é\né ::= "x"', "x"),
        ('root ::= r-1 r_1 r_1_2\nr-1 ::= "1"\nr_1 ::= "2"\nr_1_2 ::= "3"', "123"),
        (r'root ::= "\u0041\u00e9" [\u0061-\u007A] "\U0001F600\u0022\u005c"', 'Aéb😀"\\'),
        (r'root ::= "\\u0041"', "\\u0041"),
        (r"root ::= [\u005d\u002d] [^\u0000-\u001f]", "-x"),
        ('root ::= "a\nb\t" [\t\n]', "a\nb\t\n"),
        ('root ::= "a" |\r\n  "b"\r\n# rule\r\n', "b"),
        ('# root ::= "c"\nroot ::=\n  "a" ( # one\n  "b" |\n  "c" )', "ac"),
        ('root ::= [^"]* [<>]', "ab>"),
        ('root ::= ("a"+)? (("b"?)*)+ ("c"{2}){2}', "aabbcccc"),
        ("root ::= [a-z&&b]+ [~~] [--/] [+--] [a-z-]", "a&~.,-"),
        ("root ::= [^--/]", "0"),
        ("root ::= [a\\]^]{2}", "]^"),
        ("root ::= .{2}", "\n😀"),
    ],
)
def test_a_grammar_of_gbnf_is_taken(grammar: str, text: str) -> None:
    assert takes(grammar, text)
    assert not takes(grammar, text + "!")


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("start ::= x", True),
        ("  root ::= x", True),
        ('start: "::="', False),
        ("start: x // y ::= z", False),
        ('?start: "a"', False),
    ],
)
def test_gbnf_is_recognized_by_its_arrows(text: str, is_taken: bool) -> None:
    assert is_gbnf(text) == is_taken


@pytest.mark.parametrize(
    "grammar", ['?start: "a"', 'start[capture]: "a"', '%ignore " "\nstart: "a"']
)
def test_larks_ways_to_begin_a_rule_are_taken(grammar: str) -> None:
    assert takes(grammar, "a")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start ::= "a"', "no rule root"),
        ('root ::= "a" x', "rule root of the grammar names x, which is not defined"),
        ('root ::= a\na ::= "x" (b | "c")', "rule a of the grammar names b,"),
        ('root ::= "a', "line 1, column 12: a text or a class"),
        ("root ::= x\nx ::= [a", "line 2, column 9: a text or a class"),
        ('root ::= "a\\', "half an escape"),
        ('root ::= ("a"', r"line 1, column 14: expected '\)'"),
        ('root ::= "a"\n | "b"', r"line 2, column 2: a rule begins .* \| stands at the end"),
        ("root ::= 'a'", "line 1, column 10: .* in double quotes"),
        ("root ::= *", "line 1, column 10"),
        (r'root ::= "\q"', r"line 1, column 12: invalid escape sequence \\q"),
        (r'root ::= "" "\ud800"', r"\\ud800 at line 1, column 14 is no character"),
        (r'root ::= "\U00110000"', r"\\U00110000 at line 1, column 11 is no character"),
        ('root ::= "a"{x}', "line 1, column 14: expected integer"),
        ('root ::= "a"{²}', "a repetition is no number"),
        ('root ::= "a"{' + "9" * 5000 + "}", "a repetition is no number"),
        ("root ::= [a--]", r"\[a-\\x2d\] cannot be read: .* line 1, column 10"),
        ('root ::= y\n\nx ::= "b"\n  y ::= "a"{3,2}', r"{3, 2}.* line 4, column 9\.$"),
        (
            "# z\nroot ::= x\nx ::= [z-a]",
            r"\[z-a\] cannot be read: .* character 2. .* line 3, column 7",
        ),
        ("root ::= " + "(" * 5000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        takes(grammar, "")
    assert len(raised.value.message) < 400


@pytest.mark.parametrize("token", ["<tok>", "<[1]>", "!<[1]>"])
def test_special_tokens_are_refused_with_their_place(token: str) -> None:
    with pytest.raises(UnsupportedOption, match=r"Special tokens .*line 2, column 7"):
        gbnf_to_lark(f"root ::= x\nx ::= {token}")


words = st.text("abAB-_01é", min_size=1, max_size=3) | st.sampled_from(["start", "Start", "START"])


@settings(max_examples=200, deadline=None)
@given(st.lists(words.filter(lambda name: name != "root"), min_size=1, max_size=8, unique=True))
def test_rules_may_have_any_names(names: list[str]) -> None:
    """Each is the rule that it was, whatever Lark would take its name for."""
    rules = [f'{name} ::= "{number}"' for number, name in enumerate(names)]
    random.Random(len(names)).shuffle(rules)
    grammar = "\n".join([f"root ::= {' '.join(names)}", *rules])
    assert takes(grammar, "".join(map(str, range(len(names)))))


@settings(max_examples=300, deadline=None)
@given(
    st.text('root ::="a"[x]|(){2,}*?\\u0<>#\n', max_size=40).map(lambda text: f"root ::= {text}")
)
def test_any_text_is_translated_or_refused(text: str) -> None:
    with suppress(RequestError):
        takes(text, "a")
