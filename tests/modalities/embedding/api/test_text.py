"""What the API process knows of an embedding model, and how texts become ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.text_models import write_text_folder
from triptych.core.config import ModelOptions
from triptych.core.errors import InvalidRequest
from triptych.modalities.embedding.api.text import EmbeddingModel


@pytest.mark.parametrize("field", ["hidden_size", "n_embd", "d_model"])
def test_decoders_name_their_width_in_different_ways(tmp_path: Path, field: str) -> None:
    folder = write_text_folder(tmp_path, **{field: 24})
    assert EmbeddingModel.open(folder, ModelOptions()).num_dimensions == 24


def test_a_decoder_that_does_not_say_its_width_can_still_be_opened(tmp_path: Path) -> None:
    """It may be served for chat alone, so want of embeddings must not stop it."""
    model = EmbeddingModel.open(write_text_folder(tmp_path), ModelOptions())
    assert model.encode(["hi"]) == (tuple(model.reader().tokenizer.encode("hi").ids),)


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("\udcff", "Unicode")])
def test_what_is_no_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    model = EmbeddingModel.open(write_text_folder(tmp_path), ModelOptions())
    with pytest.raises(InvalidRequest, match=message):
        model.encode(["hi", text])
