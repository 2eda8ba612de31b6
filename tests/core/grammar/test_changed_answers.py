"""Answers to random schemas with one part changed: what is not valid any more is not taken.

On single bytes, without weights; `property/test_random_schemas.py` samples from a model's
vocabulary.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from support.guided import COMPILER, allowed_ids, takes, text_of
from support.samples import SAMPLES, importing_samples
from triptych.core.grammar.source import to_grammar

with importing_samples(SAMPLES / "benchmarks"):
    from structured_schemas import random_schema

MOST_TOKENS = 400


def random_answer(schema: Any, rng: random.Random) -> str | None:
    """What a grammar allows, sampled byte by byte; `None` where it comes to no end."""
    matcher = COMPILER.compile(to_grammar("json_schema", json.dumps(schema)))
    sampled: list[int] = []
    while len(sampled) < MOST_TOKENS and not matcher.is_stopped():
        if matcher.is_accepting() and rng.random() < 0.5:
            break
        ids = [each for each in allowed_ids(bytes(matcher.compute_bitmask())) if text_of([each])]
        closing = [each for each in ids if text_of([each]) in ('"', "}", "]")]
        sampled.append(rng.choice(closing if closing and rng.random() < 0.4 else ids))
        assert matcher.consume_tokens(sampled[-1:])
    return text_of(sampled) if matcher.is_accepting() else None


def is_valid(schema: Any, value: Any) -> bool:
    """By the standard, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


def changed(value: Any, rng: random.Random) -> Any:
    """`value` with one part of it left out or replaced."""
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        if rng.random() < 0.5:
            return {each: part for each, part in value.items() if each != name}
        return {**value, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        return [changed(value[0], rng), *value[1:]]
    return rng.choice([None, True, "", "a", "2024-01-01", -1, 0, 7, 10**6, 2.5, [], {}, {"k": 1}])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_taken_is_valid_also_with_one_part_changed(seed: int) -> None:
    rng = random.Random(seed)
    num_answers = 0
    for _ in range(5):
        schema = random_schema(rng)
        for _ in range(3):
            text = random_answer(schema, rng)
            if text is None:
                continue
            num_answers += 1
            value = json.loads(text)
            assert is_valid(schema, value), (schema, text)
            other = changed(value, rng)
            assert not takes(schema, other) or is_valid(schema, other), (schema, other)
    assert num_answers > 5
