"""PEFT's patterns of module paths: equal to regular expressions, and fast."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from triptych.core.weights.module_patterns import ModulePattern

PATTERNS = [
    "q_proj",
    r"layers\.1\.mlp\.up_proj",
    "^model.layers.0.q",
    r".*layers\.[02]\.(self_attn\.(q|v)_proj|mlp\.down_proj)",
    r"layers\.\d+\.(q|q_a)_proj$",
    "(a|ab)(?:c|bcd)",
    "a?b*c+",
    "|a",
]
MODULES = [
    "x.q_proj",
    "xq_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.0.q",
    "x.model.layers.0.q",
    "m.layers.2.self_attn.v_proj",
    "layers.33.q_a_proj",
    "abcd",
    "abc",
    "bbcc",
    "z.b",
]


def test_equal_to_regular_expressions() -> None:
    for pattern, module in itertools.product(PATTERNS, MODULES):
        expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
        assert ModulePattern(pattern).matches(module) is expected, (pattern, module)


@pytest.mark.parametrize("pattern", ["(a|a)" * 50 + "b", ".*" * 120 + "b", r"\w+" * 80 + "b"])
def test_a_match_has_no_backtracking(pattern: str) -> None:
    begun_s = time.process_time()
    assert not ModulePattern(pattern).matches("a" * 200)
    assert time.process_time() - begun_s < 5


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(a", "a)", "(" * 3000, "a{9999999999}", "(?=a)", r"(a)\1", "[b-a]"]
)
def test_other_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        ModulePattern(pattern)
