"""Random JSON schemas on the embedded model's vocabulary: every finished answer validates.

The logits are random, so that no model's habits keep an answer in form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.bound_rows import bound_row
from support.tiers import first
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import RequestError
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.matcher import TokenMatcher
from triptych.core.grammar.source import to_grammar
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, resolve

VOCAB_SIZE = 49152
EOS = 2
_MAX_TOKENS = 120
BIT = {"type": "boolean"}
NAMED = {"type": "object", "properties": {"name": BIT}, "required": ["name"]}
EMAIL = {"properties": {"email": BIT}, "required": ["email"]}
PHONE = {"properties": {"phone": BIT}, "required": ["phone"]}
pytestmark = pytest.mark.embedded

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.text(max_size=5).filter(str.isprintable),
)


def _bounds(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return st.one_of(st.just({}), pairs.map(lambda pair: {low: pair[0], high: pair[1]}))


leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "é"]}}]),
    st.lists(values, min_size=1, max_size=4, unique_by=repr).map(lambda of: {"enum": of}),
    _bounds("minimum", "maximum", 500).map(lambda of: {"type": "integer", **of}),
    _bounds("minimum", "maximum", 9).map(lambda of: {"type": "number", **of}),
    st.integers(2, 9).map(lambda n: {"type": "integer", "minimum": 0, "multipleOf": n}),
    _bounds("minLength", "maxLength", 8).map(lambda of: {"type": "string", **of}),
    st.sampled_from(["^[a-c]{2,5}$", "^(x|yz)+$", "^[0-9]{3}-[A-F]$", "^\\d\\w?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
        lambda kind: {"type": "string", "format": kind}
    ),
    st.tuples(st.integers(-(2**65), 0), st.integers(0, 2**65)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.integers(-(2**65), 2**65).map(lambda value: {"const": value}),
)


def _composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(inner, _bounds("minItems", "maxItems", 3)).map(
        lambda of: {"type": "array", "items": of[0], **of[1]}
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda of: {"type": "array", "prefixItems": of, "minItems": len(of), "items": False}
    )
    return st.one_of(
        _objects(inner),
        arrays,
        tuples,
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"oneOf": of}),
        _extended(inner),
    )


def _extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with more schemas that they must satisfy."""
    parts = st.lists(_objects(inner), min_size=1, max_size=2)
    words = st.sampled_from(["allOf", "anyOf", "oneOf"])
    return st.tuples(_objects(inner), words, parts).map(lambda of: {**of[0], of[1]: of[2]})


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(names, inner, max_size=4))
    required = draw(st.permutations(sorted(properties)))
    closed = {"additionalProperties": False} if draw(st.booleans()) else {}
    num_required = draw(st.integers(0, len(required)))
    return {
        "type": "object",
        "properties": properties,
        "required": required[:num_required],
        **closed,
    }


schemas = st.recursive(leaves, _composed, max_leaves=8)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    model = resolve(
        EMBEDDED_REFERENCE, name=None, options=ModelOptions(), progress=SilentProgress()
    )
    return GrammarCompiler(GrammarVocabulary.open(Path(model.folder), model.name, VOCAB_SIZE))


@pytest.fixture(scope="module")
def decode(compiler: GrammarCompiler) -> Callable[[list[int]], str]:
    return compiler.vocabulary.library.decode_str


def walk(compiler: GrammarCompiler, schema: Any, seed: int) -> tuple[list[int], str]:
    """The tokens of one answer, and why it ended: sampled from random logits."""
    params = SamplingParams(seed=seed, stop_token_ids=(EOS,), max_tokens=_MAX_TOKENS)
    grammar = to_grammar("json_schema", json.dumps(schema))
    state = TokenMatcher(
        compiler.compile(grammar), compiler.vocabulary, params, is_jumping=seed % 2 == 0
    )
    sampler = Sampler(vocab_size=VOCAB_SIZE, max_batch_size=1, device=torch.device("cpu"))
    sampler.bind(bound_row(0, params, (1,)))
    logits = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    found = state.follow((), 0, _MAX_TOKENS)
    while True:
        ids += found.forced_ids
        if found.is_complete:
            return ids, "stop"
        if len(ids) >= _MAX_TOKENS:
            return ids, "length"
        logits_BV = torch.randn(1, VOCAB_SIZE, generator=logits)
        logits_BV[0, EOS] += 8  # answers that end are those that are checked
        (sampled,) = sampler.sample(logits_BV, [0], [1 + len(ids)], [found.allowed]).token_ids_B
        if int(sampled) == EOS:
            return ids, "stop"
        ids.append(int(sampled))
        found = state.follow((int(sampled),), len(ids), _MAX_TOKENS - len(ids))


NOT_TAKEN = {"emoji": "look-ahead"}
"""Types of zod whose schemas are refused, and why."""
ZOD = json.loads((Path(__file__).parents[1] / "core/grammar/zod_schemas.json").read_text())
"""What zod 4 writes for each of its types, by `z.toJSONSchema(z.object({v: type}))`."""


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    weight: Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    path: Path
    secret: pydantic.SecretStr


class Pair(pydantic.BaseModel):
    dog: Dog
    cat: Cat
    address: pydantic.IPvAnyAddress | None = None
    inner: Pair | None = None


OWN = {
    "any of next to properties": {**NAMED, "anyOf": [EMAIL, PHONE]},
    "all of next to properties": {**NAMED, "allOf": [EMAIL, PHONE]},
    "optional next to any of": {"type": "object", "properties": {"a": BIT}, "anyOf": [EMAIL]},
    "reference next to properties": {"$ref": "#/$defs/N", **EMAIL, "$defs": {"N": NAMED}},
    "one of references": {
        "oneOf": [{"$ref": "#/$defs/N"}, {"type": "null"}],
        "$defs": {"N": NAMED},
    },
    "one of ranges": {
        "oneOf": [
            {"type": "integer", "minimum": 0, "maximum": 3},
            {"type": "integer", "minimum": 5, "maximum": 9},
        ]
    },
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "beyond 2^53": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4e38},
    "date": {"type": "string", "format": "date"},
    "29 February": {"type": "string", "format": "date", "pattern": "^2[0-9]{3}-02-29$"},
    "whole floats": {"type": "string", "maxLength": 2.0},
    "names by a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]$"},
        "additionalProperties": BIT,
    },
    "pydantic": Pair.model_json_schema(),
    "a union of pydantic": pydantic.TypeAdapter(
        Annotated[Dog | Cat, pydantic.Field(discriminator="kind")]
    ).json_schema(mode="serialization"),
}


@pytest.mark.parametrize("seeds", first([range(2), range(2, 6)]), ids=["some", "more"])
@pytest.mark.parametrize("name", [*ZOD, *OWN])
def test_schemas_of_generators_are_followed(
    compiler: GrammarCompiler, decode: Callable[[list[int]], str], name: str, seeds: range
) -> None:
    schema = ZOD[name] if name in ZOD else OWN[name]
    if name in NOT_TAKEN:
        with pytest.raises(RequestError, match=NOT_TAKEN[name]):
            walk(compiler, schema, 0)
        return
    checker = jsonschema.FormatChecker(["date", "ipv4", "ipv6"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for seed in seeds:
        ids, reason = walk(compiler, schema, seed)
        if reason == "stop":
            validator.validate(json.loads(decode(ids)))


def test_every_finished_answer_validates(
    compiler: GrammarCompiler, decode: Callable[[list[int]], str]
) -> None:
    seen = {"stop": 0, "length": 0, "refused": 0}

    @settings(
        max_examples=200,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(schemas, st.integers(0, 2**31))
    def check(schema: Any, seed: int) -> None:
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            assume(False)
        try:
            ids, reason = walk(compiler, schema, seed)
        except RequestError:
            seen["refused"] += 1
            return
        seen[reason] += 1
        if reason == "stop":
            jsonschema.validate(json.loads(decode(ids)), schema)

    check()
    assert seen["stop"] >= 120
    assert seen["refused"] <= 60, "what there are grammars for is hardly ever refused"
