from __future__ import annotations

import pytest
import torch

from support.kokoro_models import tiny_voices
from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.configs.mixture import parse_mixture
from triptych.modalities.tts.engine.models.kokoro.model import Voices, style_of


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("af_heart", {"af_heart": 1.0}),
        ("af_heart*0.7+af_bella*0.3", {"af_heart": 0.7, "af_bella": 0.3}),
        (" a * 3 + b ", {"a": 0.75, "b": 0.25}),
        ("a+b", {"a": 0.5, "b": 0.5}),
        ("a*.5", {"a": 1.0}),
    ],
)
def test_mixtures_are_shares_of_one(text: str, shares: dict[str, float]) -> None:
    assert dict(parse_mixture(text)) == pytest.approx(shares)


@pytest.mark.parametrize(
    "text", ["", "+", "a+", "a*", "a*x", "a*-1", "a*0", "a*1e3", "a*2000", "../a", "a b", "a**2"]
)
def test_invalid_voice_mixture_error_shows_the_syntax(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"af_heart\*0\.7\+af_bella\*0\.3") as caught:
        parse_mixture(text)
    assert caught.value.param == "voice"


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 8"):
        parse_mixture("+".join("abcdefghi"))


def test_unknown_voices_are_named_with_close_ones() -> None:
    with pytest.raises(InvalidRequest, match="'af_on'; did you mean af_one"):
        Voices(tiny_voices()).table("af_on")


def test_a_mixture_lies_between_its_voices() -> None:
    tables = tiny_voices()
    mixed = Voices(tables).table("af_one*3+bm_two*1")
    torch.testing.assert_close(mixed, 0.75 * tables["af_one"] + 0.25 * tables["bm_two"])


def test_a_style_is_chosen_by_length_and_held_beyond_the_last() -> None:
    table = torch.arange(5.0).reshape(5, 1, 1)
    assert [float(style_of(table, count)) for count in (1, 4, 5, 9)] == [0, 3, 4, 4]
