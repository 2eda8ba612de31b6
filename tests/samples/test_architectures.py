"""Tiny models of transformers' causal types answer as their classes do, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from support.samples import SAMPLES, importing_samples

SERVED = (
    *("llama", "exaone", "lfm2", "mamba", "phimoe", "sarvam_moe"),
    *("bloom", "deepseek_v32", "doge", "falcon", "rembert"),  # row by row
)
REFUSED = ("cpmant", "openai-gpt")


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    with importing_samples(SAMPLES / "architectures"):
        yield import_module("judge")


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_a_type_answers_as_its_class_or_is_refused(judge: Any, name: str) -> None:
    verdict = judge.judge_chat(name)
    assert (verdict.runs == "refused") == bool(verdict.reason) == (name in REFUSED), verdict
