"""Which recognizers are served, which are refused, and what may be asked of each."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto import modeling_auto

from triptych.core.errors import RequestError, WeightsError
from triptych.core.process.lazy import load
from triptych.modalities.asr.families import (
    FAMILIES,
    REFUSED,
    family_of,
    recognizes_speech,
    refusal,
)
from triptych.modalities.asr.languages import LANGUAGES
from triptych.modalities.asr.traits import Traits

NO_RECOGNIZERS = {"dia", "pop2piano", "vibevoice"}  # in transformers' lists: speech, music


def test_every_recognizer_of_transformers_is_served_or_refused() -> None:
    known = {
        *modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        *getattr(modeling_auto, "MODEL_FOR_RNNT_MAPPING_NAMES", ()),
        *getattr(modeling_auto, "MODEL_FOR_TDT_MAPPING_NAMES", ()),
    }
    assert known - NO_RECOGNIZERS <= {*FAMILIES, *REFUSED}
    assert not FAMILIES.keys() & REFUSED


@pytest.mark.parametrize("kind", REFUSED)
def test_the_others_are_refused_in_a_sentence(kind: str) -> None:
    assert recognizes_speech({"model_type": kind})
    with pytest.raises(WeightsError, match=r"is for speech recognition, but .*recognizers are"):
        family_of({"model_type": kind})


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_names_what_exists(kind: str) -> None:
    assert refusal({"model_type": kind}) is None
    assert callable(load(FAMILIES[kind].engine))
    if kind != "whisper":
        languages = family_of({"model_type": kind}).read(None).languages  # type: ignore[arg-type]
        assert set(languages) <= set(LANGUAGES)


@pytest.mark.parametrize(
    ("traits", "asked", "said"),
    [
        ({}, {"prompt": "names"}, "takes no prompt, as a model of the Owl family"),
        ({}, {"temperature": 0.5}, "does not sample"),
        ({}, {"has_word_times": True}, "segment in timestamp_granularities"),
        ({}, {"task": "translate"}, "unable to translate"),
        ({"languages": ("en",)}, {"task": "translate"}, "English-only and cannot translate"),
        ({}, {"language": "en"}, "leave language out"),
        ({"languages": ("en", "de")}, {"language": "fr"}, "supported are english, german"),
        ({"languages": ("en",), "needs_language": True}, {"language": "auto"}, "name it"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(
    traits: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    call = {"prompt": "", "temperature": 0.0, "has_word_times": False, "language": "en"} | asked
    task, language = call.pop("task", "transcribe"), call.pop("language")
    owl = Traits(family="Owl", **traits)

    def check() -> None:
        owl.check_options("m", **call)
        owl.check_task("m", task)
        owl.check_language("m", language)

    with pytest.raises(RequestError, match=said):
        check()
