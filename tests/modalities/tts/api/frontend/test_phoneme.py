"""Inputs of models of phonemes: utterances, ids, voices."""

# ruff: noqa: RUF001
from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kokoro_models import TINY, tiny_model, tiny_voices
from triptych.core.errors import InvalidRequest, UnsupportedOption, WeightsError
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment
from triptych.modalities.tts.api.frontend.phoneme import (
    KOKORO_VOICES,
    MAX_CHARACTERS,
    OPENAI_VOICES,
    PhonemeFrontEnd,
    open_phoneme_model,
)
from triptych.modalities.tts.api.text import readers
from triptych.modalities.tts.api.text.coverage import Coverage
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.phonemes import Phonemizer
from triptych.modalities.tts.api.text.tongues import reading_of
from triptych.modalities.tts.configs.kokoro import KOKORO_82M, VOCABULARY
from triptych.modalities.tts.engine.models.kokoro.convert import write_folder

NORMALIZE = Normalizer()
PHONEMIZER = Phonemizer()
OWN = ResolvedModel(name="own", reference="own", folder="", digest="")
OWN_CONFIG: dict[str, Any] = {
    "model_type": "triptych_voice",
    "codec": {"sample_rate": 24_000, "hop": 300, "frames_per_step": 4},
    "voices": [
        {"name": "anna", "description": "calm", "language": "en-US"},
        {"name": "brian", "language": "en-GB"},
    ],
}
LONG_TEXT = (
    "The fisherman and his wife lived in a small cottage by the sea, and every day he went out"
    " fishing. One morning, at 6:30 a.m., he caught a very large fish; it said: “Let me go!”\n\n"
    "So he did. He went home and told his wife what had happened, and she was not at all pleased"
    " about it, because they were poor and had nothing to eat. She sent him back to the sea."
)


def write_tiny(folder: Path, names: tuple[str, ...]) -> ResolvedModel:
    table = next(iter(tiny_voices().values()))
    voices = {f"voices.{name}": table.clone() for name in names}
    write_folder(folder, {**tiny_model().state_dict(), **voices}, TINY)
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="0")


@pytest.fixture(scope="module")
def kokoro(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    """A front end of the released alphabet; no sentence is longer than 62 phonemes."""
    names = ("af_bella", "af_heart", "am_echo", "bm_fable")
    resolved = write_tiny(tmp_path_factory.mktemp("kokoro"), names)
    return open_front_end(resolved)


@pytest.fixture(scope="module")
def own() -> PhonemeFrontEnd:
    return open_phoneme_model(OWN, OWN_CONFIG, PHONEMIZER)


@pytest.fixture(scope="module")
def whole() -> PhonemeFrontEnd:
    """Of a model that makes an utterance at once."""
    return replace(open_phoneme_model(OWN, OWN_CONFIG, PHONEMIZER), steps_per_s=0.0)


def plan(
    front_end: FrontEnd, text: str, voice: str = "", language: str = ""
) -> list[PlannedSegment]:
    canonical = front_end.check_voice(voice)
    return list(
        front_end.plan(NORMALIZE(text), voice=canonical, instructions="", language=language)
    )


def phonemes_of(planned: PlannedSegment) -> str:
    symbols = {token: symbol for symbol, token in VOCABULARY.items()}
    return "".join(symbols[token] for token in planned.segment.prompt_ids)


def test_utterances_are_the_whole_text_and_the_first_is_short(whole: PhonemeFrontEnd) -> None:
    spoken = NORMALIZE(LONG_TEXT)
    planned = plan(whole, LONG_TEXT)
    texts = [p.utterance.text for p in planned]
    assert texts[0] == "The fisherman and his wife lived in a small cottage by the sea,"
    assert "".join(p.utterance.spoken.text for p in planned) == spoken.text
    assert max(map(len, texts)) <= MAX_CHARACTERS
    for before, after in itertools.pairwise(planned):
        assert before.utterance.source.end == after.utterance.source.start


def test_a_sentence_is_not_cut_for_a_model_that_streams(
    own: PhonemeFrontEnd, whole: PhonemeFrontEnd
) -> None:
    text = "The morning train was delayed because of heavy snow on the northern line."
    assert [p.utterance.text for p in plan(own, text)] == [text]
    assert len(plan(whole, text)) == 2


def test_each_utterance_can_be_made_while_the_one_before_it_plays(whole: PhonemeFrontEnd) -> None:
    lengths = [len(p.utterance.text) for p in plan(whole, "Oh well, that was it. " * 60)]
    assert lengths[0] <= 22
    assert lengths[1] <= 80
    assert lengths[-2] > 180
    assert lengths[2] <= 150


def test_long_words_are_not_cut(own: PhonemeFrontEnd) -> None:
    planned = plan(own, "That was the end of it. An internationalization followed.")
    assert planned[0].utterance.text == "That was the end of it."
    assert len(planned) == 2


def test_words_have_their_letters_and_share_the_space_between_them(own: PhonemeFrontEnd) -> None:
    front = replace(own, prompt_prefix=(0,))
    (planned,) = plan(front, "Go on, now.")
    symbols = {token: symbol for symbol, token in VOCABULARY.items()}
    said = "".join(symbols.get(token, "") for token in planned.segment.prompt_ids)
    starts = [word.start - 1 for word in planned.words]
    assert [said[at - 1 : at] for at in starts] == ["", " ", " "]
    assert [said[word.stop - 2] == " " for word in planned.words] == [True, False, False]
    assert [word.shares_space for word in planned.words] == [True, False, False]


def test_pauses_come_between_paragraphs_alone(own: PhonemeFrontEnd) -> None:
    planned = plan(own, LONG_TEXT)
    pauses = [p.segment.pause_s for p in planned if p.utterance.text.endswith('go!"')]
    assert pauses == [pytest.approx(0.4)]
    assert sum(p.segment.pause_s > 0 for p in planned) == 1
    assert len(plan(own, "Hello there.")) == 1
    assert plan(own, "Hello there.")[0].segment.pause_s == 0


def test_rests_are_as_long_as_what_ends(kokoro: FrontEnd) -> None:
    """A model whose sentences have no silence around them gets every rest."""
    planned = plan(kokoro, LONG_TEXT)
    rests = {p.utterance.text[-1]: p.segment.pause_s for p in planned[:-1]}
    assert rests[","] == 0.08
    assert rests["."] == 0.18
    assert rests['"'] == 0.5
    assert {rest for mark, rest in rests.items() if mark.isalpha()} <= {0.0}
    assert planned[-1].segment.pause_s == 0


def test_ids_are_those_of_the_phonemes(own: PhonemeFrontEnd) -> None:
    (planned,) = plan(own, "Hello there, [Kokoro](/kˈOkəɹO/).")
    assert phonemes_of(planned) == "həlˈO ðˈɛɹ, kˈOkəɹO."


def test_speech_tokens_are_bounded_by_what_is_credible(own: PhonemeFrontEnd) -> None:
    short, long = plan(own, "Hello there.")[0], plan(own, "Hello there, my dear old friend.")[0]
    seconds = short.segment.max_steps / 20.0
    assert 2 < seconds < 8
    assert long.segment.max_steps > short.segment.max_steps


def test_a_sentence_at_once_needs_no_bound(kokoro: FrontEnd) -> None:
    assert all(p.segment.max_steps == 0 for p in plan(kokoro, "Hello there."))


def test_no_utterance_has_more_phonemes_than_the_model_takes(kokoro: FrontEnd) -> None:
    planned = plan(kokoro, "W W W dot W W W dot W W W dot W W W dot W W W dot W W W.")
    assert len(planned) > 2
    assert all(0 < len(p.segment.prompt_ids) <= 62 for p in planned)
    assert planned[-1].segment.pause_s == 0


def test_unspeakable_text_is_reported(own: PhonemeFrontEnd) -> None:
    (planned,) = plan(own, "He said 你好 to me.")
    text = planned.utterance.spoken.text
    assert [text[slice(*span)] for span in planned.unspoken] == ["你好"]
    assert planned.voiced_fraction == pytest.approx(1 - 2 / 12)
    coverage = Coverage()
    coverage.expect(planned.utterance)
    coverage.speak(planned.utterance, planned.voiced_fraction)
    assert coverage.fraction < 1


def test_an_utterance_without_sound_has_no_ids(own: PhonemeFrontEnd) -> None:
    (planned,) = plan(own, "你好吗。")
    assert planned.is_silent
    assert planned.voiced_fraction == 0
    assert planned.segment.pause_s == 0


def test_phonemes_are_worked_out_when_they_are_asked_for(
    own: PhonemeFrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Reader(Phonemizer):
        def __call__(self, spoken: Any, dialect: Any = "us") -> Any:
            read.append(spoken.text)
            return PHONEMIZER(spoken, dialect)

    monkeypatch.setattr(own, "phonemizer", Reader())
    segments = own.plan(NORMALIZE(LONG_TEXT), voice="anna", instructions="")
    assert read == []
    next(segments)
    assert len(read) == 1


@pytest.mark.parametrize(
    ("voice", "language", "water"),
    [
        ("af_heart", "", "wˈɔTəɹ"),
        ("bm_fable", "", "wˈɔːtə"),
        ("bm_fable", "en", "wˈɔːtə"),
        ("af_heart", "en-GB", "wˈɔːtə"),
        ("bm_fable", "en_us", "wˈɔTəɹ"),
        ("bm_fable", "en-AU", "wˈɔːtə"),
        ("af_heart", "en-IN", "wˈɔTəɹ"),
        ("bm_fable*2+af_heart", "", "wˈɔːtə"),
    ],
)
def test_the_voice_or_the_language_decides_the_reading(
    kokoro: FrontEnd, voice: str, language: str, water: str
) -> None:
    assert phonemes_of(plan(kokoro, "water", voice, language)[0]) == water


def test_what_it_cannot_do_is_refused_by_name(kokoro: FrontEnd) -> None:
    spoken = NORMALIZE("Hello.")
    with pytest.raises(UnsupportedOption, match="instructions") as refused:
        kokoro.plan(spoken, voice="af_heart", instructions="angrily")
    assert refused.value.param == "instructions"
    with pytest.raises(UnsupportedOption, match=r"reads en-US, .* pt-BR, zh, not 'de'"):
        kokoro.plan(spoken, voice="af_heart", instructions="", language="de")


def test_voices_are_described(kokoro: FrontEnd) -> None:
    assert [voice.name for voice in kokoro.voices] == [
        "af_bella",
        "af_heart",
        "am_echo",
        "bm_fable",
    ]
    assert kokoro.voices[3].description == "British man"
    assert kokoro.voices[3].language == "en-GB"
    assert kokoro.default_voice == "af_heart"
    assert (kokoro.takes_speed, kokoro.can_clone, kokoro.takes_instructions) == (True, False, False)


@pytest.mark.parametrize(
    ("asked", "canonical"),
    [
        ("", "af_heart"),
        ("AF_Bella", "af_bella"),
        ("echo", "am_echo"),
        ("alloy", "af_heart"),
        ("fable*3 + marin", "bm_fable*0.75+af_heart*0.25"),
    ],
)
def test_voices_go_by_several_names(kokoro: FrontEnd, asked: str, canonical: str) -> None:
    assert kokoro.check_voice(asked) == canonical
    assert kokoro.check_voice(canonical) == canonical


@pytest.mark.parametrize("voice", ["af_hart", "af_heart*0", "af_heart+nobody", "a b"])
def test_unknown_voices_are_refused(kokoro: FrontEnd, voice: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kokoro.check_voice(voice)
    assert refused.value.param == "voice"


def test_every_voice_of_openai_answers(kokoro: FrontEnd, own: PhonemeFrontEnd) -> None:
    theirs = ["alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova"]
    theirs += ["onyx", "sage", "shimmer", "verse"]
    assert sorted(OPENAI_VOICES) == theirs
    names = {voice.name for voice in kokoro.voices}
    assert {kokoro.check_voice(name) for name in theirs} <= names
    assert {own.check_voice(name) for name in theirs} == {"anna"}


@pytest.mark.parametrize("name", KOKORO_VOICES)
def test_kokoros_names_answer_in_a_model_of_our_own(own: PhonemeFrontEnd, name: str) -> None:
    assert own.check_voice(name) == "anna"
    heart = {**OWN_CONFIG, "voices": [{"name": "brian"}, {"name": "heart"}]}
    wanted = "heart" if name == "af_heart" else "brian"
    assert open_phoneme_model(OWN, heart, PHONEMIZER).check_voice(name.upper()) == wanted


def test_the_default_speaks_for_voices_of_other_servers(
    kokoro: FrontEnd, own: PhonemeFrontEnd
) -> None:
    known = [name for name in OPENAI_VOICES if not kokoro.replaces(name)]
    assert known == ["coral", "echo", "fable", "marin"]
    assert kokoro.replaces("fable + ALLOY")
    assert not any(map(kokoro.replaces, ("", "am_echo", "fable*3 + marin")))
    assert own.replaces("af_heart")
    heart = {**OWN_CONFIG, "voices": [{"name": "brian"}, {"name": "heart"}]}
    named = open_phoneme_model(OWN, heart, PHONEMIZER)
    known = [name for name in (*KOKORO_VOICES, *OPENAI_VOICES) if not named.replaces(name)]
    assert known == ["af_heart", "marin"]


def test_a_voice_of_our_own_mixes_nothing(own: PhonemeFrontEnd) -> None:
    assert own.check_voice("Brian") == "brian"
    with pytest.raises(InvalidRequest, match="anna, brian"):
        own.check_voice("anna*0.5+brian*0.5")


def test_models_of_other_kinds_have_no_front_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    resolved = ResolvedModel(name="m", reference="m", folder=str(tmp_path), digest="0")
    with pytest.raises(WeightsError, match="not a known speech model"):
        open_front_end(resolved)


@pytest.mark.parametrize("change", [{"voices": []}, {"codec": {}}, {"voices": [{"nam": "x"}]}])
def test_a_config_that_lacks_something_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_phoneme_model(OWN, {**OWN_CONFIG, **change}, PHONEMIZER)


def test_a_kokoro_without_voices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no voices"):
        open_front_end(write_tiny(tmp_path, ()))


def test_the_front_end_needs_no_torch(tmp_path: Path) -> None:
    write_tiny(tmp_path, ("af_heart",))
    code = f"""
import sys
from triptych.core.options.config import ModelOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.sources.kokoro import KOKORO
from triptych.modalities.tts.api.text import readers
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
model = ResolvedModel(name="m", reference="m", folder={str(tmp_path)!r}, digest="0")
front_end = open_front_end(model)
list(front_end.plan(Normalizer()("Hello."), voice="af_heart", instructions=""))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["Hello", "W", "3.5", "你", ",", ".", "\n\n", "—", "[a](/ə/)"])))
def test_any_text_is_planned_whole(words: list[str]) -> None:
    front_end = open_phoneme_model(OWN, OWN_CONFIG, PHONEMIZER)
    spoken = NORMALIZE(" ".join(words))
    planned = plan(front_end, " ".join(words))
    assert "".join(p.utterance.spoken.text for p in planned) == spoken.text
    for p in planned:
        assert 0 <= p.voiced_fraction <= 1
        assert all(0 < token < KOKORO_82M["n_token"] for token in p.segment.prompt_ids)
        assert p.is_silent == (not p.segment.prompt_ids)


FOREIGN_VOICES = {
    "ef_dora": "es",
    "ff_siwis": "fr-FR",
    "hf_alpha": "hi",
    "if_sara": "it",
    "jf_alpha": "ja",
    "pf_dora": "pt-BR",
    "zf_xiaobei": "zh",
}


@pytest.fixture(scope="module")
def worldly(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    """Voices of every language that Kokoro has; `am_puck` is the one of English."""
    return open_front_end(write_tiny(tmp_path_factory.mktemp("k"), (*FOREIGN_VOICES, "am_puck")))


@pytest.mark.parametrize(("voice", "tag"), FOREIGN_VOICES.items())
def test_a_voice_of_another_language_speaks_english_only_when_asked_to(
    worldly: FrontEnd, voice: str, tag: str
) -> None:
    assert worldly.default_voice == "am_puck"
    assert worldly.voices_by_name[voice].language == tag
    spoken = NORMALIZE("Hello.")
    for mixed in (voice, f"{voice}*0.5+am_puck*0.5"):
        assert worldly.reading("", mixed) == reading_of(tag)
        for language, reading in (("en", "us"), ("en-US", "us"), ("en-GB", "uk")):
            assert worldly.reading(language, mixed) == reading
            assert list(worldly.plan(spoken, voice=mixed, instructions="", language=language))


SENTENCES = {
    "es": ("¡Buenos días, señor!", "bwˈenos ðˈias, seɲˈoɾ!"),
    "fr": ("Les enfants jouent.", "lez ɑ̃fˈɑ̃ ʒˈu."),
    "hi": ("मेरा घर बड़ा है।", "mˈeːɾaː ɡʰˈəɾ bˈəɽaː hɛː."),
    "it": ("Gli gnocchi, per favore.", "ʎɪ ɲˈɔkːɪ, per favˈore."),
    "pt-br": ("Não, obrigado.", "nˈɐ̃ʊ̃, obriɡˈadʊ."),
}


@pytest.mark.parametrize(("language", "sentence"), SENTENCES.items())
def test_a_language_is_read_by_its_rules(
    worldly: FrontEnd, own: PhonemeFrontEnd, language: str, sentence: tuple[str, str]
) -> None:
    reading = worldly.reading(language, "am_puck")
    spoken = Normalizer(NormalizeOptions(dialect=reading))(sentence[0])
    (planned,) = worldly.plan(spoken, voice="am_puck", instructions="", language=language)
    assert phonemes_of(planned) == sentence[1]
    assert planned.voiced_fraction == 1
    with pytest.raises(UnsupportedOption, match="reads en-US, en-GB, not") as refused:
        own.plan(spoken, voice="anna", instructions="", language=language)
    assert refused.value.param == "language"


@pytest.mark.parametrize(
    ("voice", "language", "message"),
    [
        ("jf_alpha", "", r"Japanese needs .* pip install 'triptych\[japanese\]'"),
        ("am_puck", "zh-CN", r"Mandarin needs .* pip install 'triptych\[mandarin\]'"),
    ],
)
def test_a_language_without_its_package_is_refused_by_name(
    worldly: FrontEnd,
    monkeypatch: pytest.MonkeyPatch,
    voice: str,
    language: str,
    message: str,
) -> None:
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=message) as refused:
        worldly.check_language(language, voice)
    assert refused.value.param == ("language" if language else "voice")


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("Hello there. It is a fine day, and we are glad.", 1.0, 1.0),
        ("Jürgen Müller met François Hollande in São Paulo.", 1.0, 1.0),
        ("Guten Morgen, wie geht es Ihnen heute?", 0.0, 0.0),
        ("Il fait beau aujourd'hui. Les enfants jouent dans le jardin. " * 9, 0.0, 0.0),
        ("He read it to me. Das Wetter ist heute sehr schön. I agreed.", 0.4, 0.6),
        ("He read it to me. Das Wetter ist heute sehr schön, книга. I agreed.", 0.3, 0.5),
    ],
)
def test_text_read_by_the_wrong_rules_is_spoken_and_not_covered(
    kokoro: FrontEnd, own: PhonemeFrontEnd, text: str, least: float, most: float
) -> None:
    for front in (kokoro, own):
        parts = list(front.plan(NORMALIZE(text), voice=front.default_voice, instructions=""))
        coverage = Coverage()
        for part in parts:
            assert not part.is_silent
            coverage.expect(part.utterance)
            coverage.speak(part.utterance, part.voiced_fraction)
        assert least <= coverage.fraction <= most
