"""A folder of another kind: the message says what it is, and what of that kind is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triptych
from support import asr, embedding_models, vision_models
from triptych.core.errors import ConfigError, WeightsError
from triptych.modalities.llm.engine.fallback import FallbackBlueprint
from triptych.modalities.registry import MODALITIES

PIPELINES = {name: each.role for each in MODALITIES for name in each.pipelines}


def folder_of(kind: str, folder: Path) -> None:
    if kind == "vision":
        vision_models.save_model("qwen3_vl", folder)
    elif kind == "asr":
        asr.write_folder(folder)
    else:
        embedding_models.save(folder)


@pytest.mark.parametrize("kind", ["vision", "asr", "embedding"])
@pytest.mark.parametrize("name", ["ChatPipeline", "TranscriptionPipeline", "SpeechPipeline"])
def test_a_pipeline_names_the_one_that_runs_the_model(name: str, kind: str, tmp_path: Path) -> None:
    folder_of(kind, tmp_path)
    if PIPELINES[name] == kind:
        return
    own = next(pipeline for pipeline, role in PIPELINES.items() if role == kind)
    with pytest.raises(ConfigError, match=rf"of another kind \({kind}\): use {own}"):
        getattr(triptych, name).from_pretrained(str(tmp_path), progress=False)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("wav2vec2", "recognizes speech"),
        ("hubert", "recognizes speech"),
        ("moonshine", "recognizes speech"),
        ("seamless_m4t", "recognizes speech"),
        ("qwen3_vl", "sees images"),
        ("vits", "speech model"),
        ("t5", "its decoder reads an encoder's states"),
        ("vit", "no language model that transformers knows"),
        ("invented", "no language model that transformers knows"),
        (None, "no language model that transformers knows"),
    ],
)
def test_what_is_no_language_model_is_called_what_it_is(family: str | None, said: str) -> None:
    with pytest.raises(WeightsError, match=rf"{family!r} in config\.json") as caught:
        FallbackBlueprint(
            {"model_type": family}, max_length=0, dtype=torch.float32, device=torch.device("cpu")
        )
    assert said in caught.value.message
