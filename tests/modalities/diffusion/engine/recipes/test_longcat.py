"""LongCat-Image reads quoted words by their letters, and counts them so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.modalities.diffusion.engine.recipes.longcat import LongCatImage, LongCatImageEdit
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import ImageRequest


class WordTokenizer:
    """A token for each word or letter given alone."""

    def __init__(self) -> None:
        self.num_calls = self.num_texts = 0

    def __call__(self, texts: list[str], **options: Any) -> SimpleNamespace:
        self.num_calls, self.num_texts = self.num_calls + 1, self.num_texts + len(texts)
        return SimpleNamespace(input_ids=[[hash(word) for word in text.split()] for text in texts])


@pytest.mark.parametrize(
    ("prompt", "num_read", "is_cut"),
    [
        ("", 0, False),
        ("a cat", 2, False),
        ('write "abc" there', 7, False),
        ('"' + 510 * "a" + '"', 512, False),
        ('"' + 32_000 * "a" + '"', 512, True),
        ('"' + "".join(map(chr, range(0x4E00, 0x9E00))) + '"', 512, True),
        ("a " * 513, 512, True),
    ],
)
def test_prompt_tokens_are_those_read(prompt: str, num_read: int, is_cut: bool) -> None:
    for kind in (LongCatImage, LongCatImageEdit):
        words = WordTokenizer()
        parts = {"tokenizer": words, "text_encoder": None}
        recipe = kind(parts, spec_of(f"{kind.__name__}Pipeline"))
        request = ImageRequest(prompt=prompt, guidance_scale=1.0)
        assert recipe.num_prompt_tokens(request) == num_read
        assert recipe.is_prompt_cut(request) == is_cut
        assert words.num_calls <= 2
        assert words.num_texts <= 2 * 513
