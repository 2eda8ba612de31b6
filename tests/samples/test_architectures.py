"""Tiny models of transformers' causal types answer as their classes do, or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from support.samples import SAMPLES, importing_samples

SERVED = (
    *("llama", "deepseek_v32", "exaone", "lfm2", "mamba", "mistral4", "phimoe", "sarvam_moe"),
    *("bloom", "doge", "falcon", "rembert"),  # row by row
)
REFUSED = ("cpmant", "openai-gpt")


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    with importing_samples(SAMPLES / "architectures"):
        yield import_module("judge")


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_a_type_answers_as_its_class_or_is_refused(judge: Any, name: str) -> None:
    verdict = judge.judge_chat(name)
    answers = verdict.runs in {"native", "transformers", "row by row"}
    assert (answers, bool(verdict.reason)) == (name in SERVED, name in REFUSED), verdict


def test_the_page_has_what_is_said_of_each_pipeline(judge: Any) -> None:
    page = json.loads(import_module("page").RESULTS.read_text("utf-8"))
    for name, found in page["images"].items():
        verdict = judge.judge_pipeline(name)
        assert (verdict.runs, verdict.reason) == (found["runs"], found["reason"]), name


def test_page_is_what_its_results_say() -> None:
    with importing_samples(SAMPLES / "architectures"):
        page = import_module("page")
        made = page.render(json.loads(page.RESULTS.read_text("utf-8")))
    hint = "run `python samples/architectures/page.py > docs/architectures.md`"
    assert (SAMPLES.parent / "docs" / "architectures.md").read_text("utf-8") == made, hint


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers
def test_every_type_of_these_versions_is_listed() -> None:
    with importing_samples(SAMPLES / "architectures"):
        catalog, page = import_module("catalog"), import_module("page")
        results = json.loads(page.RESULTS.read_text("utf-8"))
        if results["versions"] != catalog.versions():
            pytest.skip("the page was made with other versions of transformers or diffusers")
        known = catalog.catalog()
    for kind, types in known.items():
        assert types == {name: each["class"] for name, each in results[kind].items()}
    served = [
        each for each in results["chat"].values() if each["runs"] not in {"refused", "FAILED"}
    ]
    assert len(served) >= 150
    assert all(each["reason"] for each in results["chat"].values() if each["runs"] == "refused")
