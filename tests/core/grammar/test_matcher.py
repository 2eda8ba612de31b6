"""What may come next in a row: exactly what its grammar and its stop tokens say."""

from __future__ import annotations

import json
import random
import re

import pytest
from llguidance import LLMatcher

from support.guided import EOS, TOKENIZER, VOCABULARY, allowed_ids, ids_of, text_of
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.constraint import ConstraintKind
from triptych.core.grammar.matcher import TokenMatcher
from triptych.core.grammar.source import to_grammar

COMPILER = GrammarCompiler(VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def matcher(
    text: str, kind: ConstraintKind = "regex", *, jumps: bool = True, **sampling: object
) -> TokenMatcher:
    given = SamplingParams(**{"stop_token_ids": (EOS,), **sampling})  # type: ignore[arg-type]
    compiled = COMPILER.compile(to_grammar(kind, text))
    return TokenMatcher(compiled, VOCABULARY, given, is_jumping=jumps)


def walk(state: TokenMatcher, seed: int, most: int = 200) -> tuple[list[int], str]:
    """A row that samples at random what is allowed, the same at the same position."""
    ids: list[int] = []
    allowance = state.follow((), 0, most)
    while True:
        ids += allowance.forced_ids
        if allowance.is_complete:
            return ids, "stop"
        if len(ids) >= most:
            return ids, "length"
        choices = allowed_ids(allowance.allowed)
        sampled = choices[random.Random(f"{seed} {len(ids)}").randrange(len(choices))]
        if sampled == EOS:
            return ids, "stop"
        ids.append(sampled)
        allowance = state.follow((sampled,), len(ids), most - len(ids))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("jumps", [True, False])
def test_a_random_walk_is_a_word_of_the_language(seed: int, jumps: bool) -> None:
    pattern = r"(0|[1-9][0-9]{0,3})(-[a-c]{2,3}|, und so weiter)*"
    ids, reason = walk(matcher(pattern, jumps=jumps), seed, most=60)
    if reason == "stop":
        assert re.fullmatch(pattern, text_of(ids))


@pytest.mark.parametrize("seed", range(20))
def test_forced_tokens_are_the_same_sampled_or_skipped_over(seed: int) -> None:
    schema = json.dumps(PERSON)
    jumped = walk(matcher(schema, "json_schema", jumps=True), seed)
    sampled = walk(matcher(schema, "json_schema", jumps=False), seed)
    assert jumped == sampled
    if jumped[1] == "stop":
        assert set(json.loads(text_of(jumped[0]))) == {"name", "age"}


def test_a_row_may_stop_just_where_its_text_may_end() -> None:
    state = matcher("ab?")
    assert allowed_ids(state.follow((), 0, 9).allowed) == ids_of("a")
    after_a = state.follow(ids_of("a"), 1, 8)
    assert sorted(allowed_ids(after_a.allowed)) == sorted([EOS, *ids_of("b")])
    assert state.follow(ids_of("b"), 2, 7).is_complete


def test_a_row_without_stop_tokens_ends_when_nothing_may_follow() -> None:
    state = matcher("ab?", stop_token_ids=())
    state.follow((), 0, 9)
    assert allowed_ids(state.follow(ids_of("a"), 1, 8).allowed) == ids_of("b")
    assert state.follow(ids_of("b"), 2, 7).is_complete


def test_stop_tokens_wait_for_min_tokens_but_a_whole_text_does_not() -> None:
    state = matcher("a*b?", min_tokens=3)
    assert EOS not in allowed_ids(state.follow((), 0, 9).allowed)
    assert EOS not in allowed_ids(state.follow(ids_of("a"), 1, 8).allowed)
    assert EOS in allowed_ids(state.follow(ids_of("aa"), 3, 6).allowed)
    short = matcher("ab", min_tokens=5)
    short.follow((), 0, 9)
    assert short.follow(ids_of("a"), 1, 8).forced_ids == tuple(ids_of("b"))


def test_a_stop_token_that_is_text_only_stops() -> None:
    comma = ids_of(",")[0]
    state = matcher("a+(,b)?", stop_token_ids=(EOS, comma))
    assert allowed_ids(state.follow((), 0, 9).allowed) == ids_of("a")
    assert set(allowed_ids(state.follow(ids_of("a"), 1, 8).allowed)) == {
        EOS,
        comma,
        *ids_of("a"),
    }
    needed = matcher("a,b", stop_token_ids=(comma,))
    needed.follow((), 0, 9)
    with pytest.raises(InvalidRequest, match="stop token"):
        needed.follow(ids_of("a"), 1, 8)


def test_special_tokens_are_no_text() -> None:
    state = matcher("(.|\n)*")
    specials = {token for token in range(3) if token != EOS}
    assert not specials & set(allowed_ids(state.follow((), 0, 9).allowed))
    spelled = matcher(r"<\|im_end\|>!", stop_token_ids=())
    spelled.follow((), 0, 99)
    assert text_of(spelled.follow(ids_of("<"), 1, 98).forced_ids) == "|im_end|>!"


def test_forced_tokens_end_with_the_room_for_them() -> None:
    state = matcher("a long text that is forced")
    assert state.follow((), 0, 9).forced_ids == ()  # the first is sampled
    assert text_of(state.follow(ids_of("a"), 1, 5).forced_ids) == " long"


def test_a_long_text_is_forced_to_its_end() -> None:
    state = matcher("x{3000}yz?", stop_token_ids=())
    state.follow((), 0, 9999)
    forced = state.follow(ids_of("x"), 1, 9998).forced_ids
    assert text_of(forced) == "x" * 2999 + "y"


def test_a_grammar_that_leads_nowhere_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no answer"):
        matcher('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "json_schema")


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"if": {}, "then": {}}', "if, then"),
        ("json_schema", '{"properties": {"a": {"contains": {}}}}', "contains"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"minimum": 2}]}', "oneOf"),
        ("grammar", 'start: "a" <|im_end|>', r"<\|im_end\|>"),
        ("grammar", 'start: "a" <[0-2]>', r"<\[0-2\]>"),
    ],
)
def test_what_is_not_offered_is_named(kind: ConstraintKind, text: str, named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named):
        matcher(text, kind)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", "[1]", "must be an object"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": ' * 200 + "{}" + "}}" * 200,
            "deeply",
        ),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "string", "maxLength": "2"}', "#/maxLength"),
        ("json_schema", '{"$ref": "https://example.com/a"}', "example.com"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("regex", "(", "unclosed group"),
        ("regex", r"(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "root ::= (", "cannot be read"),
        ("grammar", "start: " + "(" * 5000, "cannot be read|nested"),
    ],
)
def test_what_is_wrong_is_said(kind: ConstraintKind, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as raised:
        matcher(text, kind)
    assert len(raised.value.message) < 400


def test_grammars_in_both_notations_mean_the_same() -> None:
    gbnf = 'root ::= ("<b>" | "# " [a-c]+) "//"'
    lark = 'start: ("<b>" | "# " /[a-c]+/) "//"'
    for seed in range(5):
        walks = [walk(matcher(text, "grammar"), seed) for text in (gbnf, lark)]
        assert walks[0] == walks[1]


def test_choices_are_taken_to_the_letter() -> None:
    choices = ['say "no"', "back\\slash", "naïve\n😀", "start: x"]
    said = {text_of(walk(matcher(json.dumps(choices), "choice"), seed)[0]) for seed in range(60)}
    assert said == set(choices)


def test_compiled_grammars_are_kept_and_rows_do_not_share_a_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, grammar = GrammarCompiler(VOCABULARY), to_grammar("regex", "ab*")
    first = compiler.compile(grammar)
    assert compiler.holds(grammar)
    assert first.consume_tokens(ids_of("ab"))
    monkeypatch.setattr(LLMatcher, "validate_grammar", None)
    assert allowed_ids(compiler.compile(grammar).compute_bitmask()) == ids_of("a")


def test_a_slow_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too long to compile"):
        GrammarCompiler(VOCABULARY, max_compile_s=0.0).compile(to_grammar("regex", "a"))


def test_the_byte_tokenizer_is_what_these_tests_are_about() -> None:
    assert len(ids_of("é")) == 2
    assert TOKENIZER.get_vocab_size() < VOCABULARY.vocab_size


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("jumps", [True, False])
def test_masks_after_drafts_are_those_of_the_tokens_one_by_one(seed: int, jumps: bool) -> None:
    """Right drafts and wrong ones leave the state as it was, and end before the row does."""
    schema, rng = json.dumps(PERSON), random.Random(seed)
    ids, _ = walk(matcher(schema, "json_schema", jumps=False), seed)
    plain, state = (matcher(schema, "json_schema", jumps=each) for each in (False, jumps))
    masks = [plain.follow((), 0, 200).allowed]
    masks += [plain.follow((each,), n + 1, 199 - n).allowed for n, each in enumerate(ids)]
    found, num = state.follow((), 0, 200), 0
    while num + len(found.forced_ids) < len(ids):
        num += len(found.forced_ids)
        right = ids[num : num + rng.randrange(6)]
        after = state.follow_drafts([*right, rng.randrange(259)], num, 200 - num, 1.0).masks
        num_kept = min(len(right), len(ids) - num - 1)
        assert len(after) >= num_kept
        assert list(after[:num_kept]) == masks[num + 1 : num + 1 + num_kept]
        taken = ids[num : num + 1 + rng.randrange(num_kept + 1)]
        num += len(taken)
        found = state.follow(taken, num, 200 - num)
    assert [*ids[:num], *found.forced_ids] == ids


def test_forced_tokens_that_were_begun_are_completed() -> None:
    """Though a tokenizer would divide the rest of the text in another way."""
    state = matcher("a(bcdef|x)", jumps=True)
    state.follow((), 0, 9)
    state.follow(ids_of("a"), 1, 8)
    (mask,) = state.follow_drafts(ids_of("b"), 1, 8, 1.0).masks
    assert allowed_ids(mask) == ids_of("c")
    state._forced = lambda num_left: []  # type: ignore[method-assign]
    assert text_of(state.follow(ids_of("bc"), 3, 6).forced_ids) == "def"


def test_drafts_that_lead_to_an_error_are_as_if_never_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = matcher("a[bc]{5}")
    state.follow((), 0, 9)
    before = state.follow(ids_of("a"), 1, 8).allowed

    def fail(*_: object) -> bytes:
        raise InvalidRequest("too large")

    with monkeypatch.context() as patch:
        patch.setattr(state, "_mask", fail)
        with pytest.raises(InvalidRequest):
            state.follow_drafts(ids_of("bc"), 1, 8, 1.0)
    state.begin_again(COMPILER.compile(to_grammar("regex", "a[bc]{5}")))
    assert state.follow((), 1, 8).allowed == before
