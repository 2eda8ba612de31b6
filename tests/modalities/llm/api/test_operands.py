"""The first word of `triptych chat`: a model or the beginning of the prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from triptych.core.errors import ConfigError
from triptych.modalities.llm.api.operands import split_operands


def split(*words: str, **given: object) -> tuple[str, list[str]]:
    model, prompt = split_operands(argparse.Namespace(operands=list(words), **given))
    return model, list(prompt)


@pytest.mark.parametrize(
    "model",
    [
        "qwen2.5-coder-0.5b",
        "smollm2-135m-instruct",
        "triptych-vision",
        "Qwen/Qwen3-0.6B",
        "gpt2-xl/b",
    ],
)
def test_names_and_hub_ids_are_models(model: str) -> None:
    assert split(model) == (model, [])
    assert split(model, "Why", "so?") == (model, ["Why", "so?"])


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello",
        "Why is the sky blue?",
        "embedded",
        "and/or",
        "24/7",
        "TCP/IP",
        "co-operate",
        "2+2",
        "",
    ],
)
def test_everything_else_is_a_prompt(prompt: str) -> None:
    assert split(prompt, "please") == ("", [prompt, "please"])


def test_files_and_folders_are_models(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for path in (tmp_path, tmp_path / "m.gguf"):
        assert split(str(path), "hi") == (str(path), ["hi"])
    assert split(str(tmp_path / "other.gguf")) == ("", [str(tmp_path / "other.gguf")])


def test_with_a_model_all_words_are_the_prompt() -> None:
    assert split("triptych-vision", model=["x"]) == ("", ["triptych-vision"])


def test_a_misspelled_model_is_no_prompt() -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen2\.5-coder-0\.5b"):
        split("qwen2.5-codr-0.5b", "hi")
