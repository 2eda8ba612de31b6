"""Calls that are forced: what a model may write then, and what is read of it."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from triptych.core.grammar.constraint import Constraint, ConstraintKind
from triptych.core.grammar.source import to_grammar
from triptych.core.limits import MAX_TOOLS
from triptych.modalities.llm.api.tools.forced import answer_constraint
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.pieces import Answer
from triptych.modalities.llm.api.tools.schema import NamedTool, Tool, ToolSet

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string", "enum": ["Paris", "Rome"]}},
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in (
        {"name": "get_weather", "parameters": CITY, "strict": True},
        {"name": "get_time"},
    )
]
NAMED = NamedTool.model_validate({"type": "function", "function": {"name": "get_weather"}})
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
BERLIN = PARIS.replace("Paris", "Berlin")
TIME = '{"name": "get_time", "arguments": {}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def fits(
    text: str,
    tool_set: ToolSet,
    syntax: AnswerSyntax,
    reasoning_end: str = "",
    form: Constraint | None = None,
) -> bool:
    """Whether the grammar takes a text, and may end there."""
    constraint = answer_constraint(tool_set, syntax, reasoning_end, form)
    assert constraint is not None
    tokenizer = LLTokenizer("byte")
    grammar = to_grammar(constraint.kind, *constraint.parts[:2], constraint.schemas)
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def read(text: str, tool_set: ToolSet, syntax: AnswerSyntax) -> Answer:
    parser = syntax.parser(tool_set.schemas, "", is_forced=False)
    return Answer.of([*parser.push(text), *parser.finish()])


WORDS = (
    '{"name": "Ada", "arguments": {"city": "Berlin"}}',
    '{"name": "get_weather_of", "arguments": {"city": "Berlin"}}',
    '{"names": ["get_weather"]}',
)


@pytest.mark.parametrize(
    ("text", "is_fit"),
    [
        (hermes(PARIS), True),
        (hermes(TIME), True),
        (hermes(PARIS, TIME, PARIS), True),
        (hermes(BERLIN), False),
        (hermes(PARIS.replace("}}", ', "x": 1}}')), False),
        ("", False),
        ("Sunny.", False),
        (hermes(PARIS) + " Sunny.", False),
        (hermes(PARIS)[:-3], False),
    ],
)
def test_a_required_call_is_all_that_is_written(text: str, is_fit: bool) -> None:
    tool_set = ToolSet.of(TOOLS, "required")
    assert fits(text, tool_set, AnswerSyntax()) is is_fit
    thought = f"Hm, {hermes(BERLIN)}?</think>{text}"
    assert fits(thought, tool_set, AnswerSyntax(reasoning="think"), "</think>") is is_fit


def test_schemas_that_multiply_do_so_in_the_child_alone() -> None:
    parts = [{"$ref": "#/$defs/all"}] * 500
    parameters = {"$defs": {"all": {"enum": [*range(5000)]}}, "allOf": parts}
    function = {"name": "f", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    constraint = answer_constraint(ToolSet.of([tool], "required"), AnswerSyntax(), "")
    assert constraint is not None
    assert sum(map(len, constraint.parts)) < 2 * len(json.dumps(parameters))


LLAMA = AnswerSyntax(calls="llama3-json")
FENCED = f"```json\n{PARIS}\n```"


@pytest.mark.parametrize("separator", ["", "\n", " "])
@pytest.mark.parametrize(
    ("text", "is_fit"),
    [
        (PARIS, True),
        (BERLIN, False),
        (PARIS.replace(" ", ""), True),
        (BERLIN.replace(" ", ""), False),
        (PARIS.replace('{"name"', '{ "type": "function", "name"'), True),
        (BERLIN.replace('{"name"', '{ "type": "function", "name"'), False),
        (TIME.replace("{}", '{"zone": 1}'), True),
        (TIME.replace("{}", "1"), False),
        (f"{PARIS} Sunny.", False),
        *((words, True) for words in WORDS),
        (f"Write {BERLIN}.", True),
        ("Sunny.", True),
        ("", True),
    ],
)
@pytest.mark.parametrize("syntax", [AnswerSyntax(), LLAMA], ids=["hermes", "llama"])
def test_what_begins_like_a_call_without_marks_follows_its_schema(
    syntax: AnswerSyntax, text: str, is_fit: bool, separator: str
) -> None:
    tool_set = ToolSet.of(TOOLS, "auto")
    assert fits(separator + text, tool_set, syntax) is is_fit
    if text.startswith("{") and '"get_time"' not in text:
        called = read(separator + text, tool_set, syntax)
        assert bool(called.calls) is (text not in WORDS), "what is held is what is read as a call"


def test_several_calls_without_marks_follow_their_schemas() -> None:
    tool_set = ToolSet.of(TOOLS, "auto")
    for syntax, text in ((AnswerSyntax(), f"{TIME}\n{PARIS}"), (LLAMA, f"{TIME}; {PARIS}")):
        assert fits(text, tool_set, syntax)
        assert not fits(text.replace("Paris", "Berlin"), tool_set, syntax)
        assert len(read(text, tool_set, syntax).calls) == 2
        assert not fits(text, ToolSet.of(TOOLS, "auto", is_parallel=False), syntax)


def test_a_call_in_a_fence_follows_its_schema() -> None:
    tool_set = ToolSet.of(TOOLS, "auto")
    assert fits(FENCED, tool_set, AnswerSyntax())
    assert not fits(FENCED.replace("Paris", "Berlin"), tool_set, AnswerSyntax())
    assert not fits(f"{FENCED} So.", tool_set, AnswerSyntax())
    assert fits("```json\n{}\n``` So.", tool_set, AnswerSyntax())
    assert fits(FENCED.replace("Paris", "Berlin"), tool_set, LLAMA), "it reads none there"


def test_a_call_between_marks_does_not_excuse_one_before_it() -> None:
    tool_set = ToolSet.of(TOOLS, "auto")
    assert not fits(f"{BERLIN}\n{hermes(PARIS)}", tool_set, AnswerSyntax())
    assert fits(f"I look. {hermes(PARIS)}", tool_set, AnswerSyntax())


def test_many_strict_tools_are_followed() -> None:
    function = {"parameters": CITY, "strict": True}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": f"tool.no-{n}", **function}})
        for n in range(MAX_TOOLS)
    ]
    text = PARIS.replace("get_weather", "tool.no-99")
    for syntax in (AnswerSyntax(), LLAMA):
        assert fits(text, ToolSet.of(tools, "auto"), syntax)
        assert not fits(text.replace("Paris", "Rom"), ToolSet.of(tools, "auto"), syntax)


def test_a_named_tool_is_called_once() -> None:
    tool_set = ToolSet.of(TOOLS, NAMED)
    assert fits(hermes(PARIS), tool_set, AnswerSyntax())
    assert not fits(hermes(TIME), tool_set, AnswerSyntax())
    assert not fits(hermes(PARIS, PARIS), tool_set, AnswerSyntax())


def test_families_with_special_marks_write_a_list() -> None:
    syntax = AnswerSyntax(calls="mistral", has_special_marks=True)
    tool_set = ToolSet.of(TOOLS, "required")
    text = f"[{PARIS}, {TIME}]"
    assert fits(text, tool_set, syntax)
    assert not fits(f"[{BERLIN}]", tool_set, syntax)
    parser = syntax.parser(tool_set.schemas, "", is_forced=True)
    answer = Answer.of([*parser.push(text), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]


@pytest.mark.parametrize(
    ("text", "is_fit"),
    [
        ("Sunny < or > not.", True),
        (f"I look. {hermes(PARIS)}", True),
        (f"I look. {hermes(PARIS, TIME)}", True),
        (f"I look. {hermes(BERLIN)}", False),
        ("A <tool_call> of the wild", False),
    ],
)
def test_strict_tools_that_are_called_freely_follow_their_schema(text: str, is_fit: bool) -> None:
    assert fits(text, ToolSet.of(TOOLS, "auto"), AnswerSyntax()) is is_fit


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    tool_set = ToolSet.of(TOOLS, "required")
    assert not fits(hermes(TIME.replace("{}", '{"zone": "UTC"}')), tool_set, AnswerSyntax())


FORMS: dict[ConstraintKind, tuple[str, str]] = {
    "json_schema": ('{"enum": ["red"]}', '"red"'),
    "regex": ("[0-9]{2}", "36"),
    "choice": ('["yes", "no"]', "yes"),
    "grammar": ('start: "a" b\nb: "b"', "ab"),
}


@pytest.mark.parametrize("kind", FORMS)
def test_reasoning_goes_before_an_answer_of_a_form(kind: ConstraintKind) -> None:
    text, answer = FORMS[kind]
    form, syntax = Constraint(kind, text, "param"), AnswerSyntax(reasoning="think")
    assert fits(f"Hm.\n</think>{answer}", ToolSet(), syntax, "</think>", form)
    assert not fits("Hm.\n</think>Well.", ToolSet(), syntax, "</think>", form)
    assert not fits(answer, ToolSet(), syntax, "</think>", form), "a thought without an end"
    assert answer_constraint(ToolSet(), syntax, "", form) is form


@pytest.mark.parametrize("kind", FORMS)
def test_an_answer_has_its_form_or_is_a_call(kind: ConstraintKind) -> None:
    text, answer = FORMS[kind]
    form, tool_set = Constraint(kind, text, "param"), ToolSet.of(TOOLS, "auto")
    assert fits(answer, tool_set, AnswerSyntax(), form=form)
    assert fits(hermes(PARIS, TIME), tool_set, AnswerSyntax(), form=form)
    assert not fits(hermes(BERLIN), tool_set, AnswerSyntax(), form=form), "the tool is strict"
    assert not fits(f"I look. {hermes(PARIS)}", tool_set, AnswerSyntax(), form=form)
    required = ToolSet.of(TOOLS, "required")
    calls_alone = answer_constraint(required, AnswerSyntax(), "")
    assert answer_constraint(required, AnswerSyntax(), "", form) == calls_alone


def test_other_answers_have_no_form() -> None:
    assert answer_constraint(ToolSet.of(TOOLS[1:], None), AnswerSyntax(), "") is None
    assert answer_constraint(ToolSet.of(TOOLS, "none"), AnswerSyntax(), "") is None
    assert answer_constraint(ToolSet.of(TOOLS, "auto"), AnswerSyntax(calls="mistral"), "") is None
