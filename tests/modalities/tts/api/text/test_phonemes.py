"""Text to phonemes, after the normalizer has read out digits and signs."""

# ruff: noqa: RUF001
from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.phonemes import Dialect, Phonemes, Phonemizer
from triptych.modalities.tts.api.text.spoken import Span
from triptych.modalities.tts.configs.kokoro import VOCABULARY

NORMALIZE = Normalizer()
PHONEMIZER = Phonemizer()


def read(text: str, dialect: Dialect = "us") -> Phonemes:
    return PHONEMIZER(NORMALIZE(text), dialect)


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello there.", "həlˈO ðˈɛɹ."),
        ("I read it. I have read it.", "ˌI ɹˈɛd ɪt. ˌI hæv ɹˈɛd ɪt."),
        ("The apple, the pear", "ði ˈæpᵊl, ðə pˈɛɹ"),
        ("3 dogs", "θɹˈi dˈɔɡz"),
        ("$5.20 (cash)…", "fˈIv dˈɑləɹz ænd twˈɛnti sˈɛnts (kˈæʃ)…"),
        ('He said "no".', "hˌi sˈɛd “nˈO”."),
        ('"(Yes)" she said', "“(jˈɛs)” ʃi sˈɛd"),
        ("wait—what?!", "wˈAt—wˌʌt?!"),
        ("state-of-the-art", "stˈAtʌvðiˈɑɹt"),
        ("it isn't, don’t", "ɪt ˈɪzᵊnt, dˈOnt"),
        ("rock 'n' roll, the 'best' dogs' bone", "ɹˈɑk ˈɛn ɹˈOl, ðə bˈɛst dˈɔɡz bˈOn"),
        ("the USA", "ðə jˈu ˈɛs ˈA"),
        ("A B C. A/B", "ˈA bˈi sˈi. ˈA bˈi"),
        ("a B movie", "ɐ bˈi mˈuvi"),
        ("vitamin A.", "vˈITəmən ˈA."),
        ("Plan B.", "plˈæn bˈi."),
        ("O.K. K. No.", "ˈO kˈA kˈA. nˈO."),
        ("AT&T's 100%", "ˈA tˈi ænd tˈiz wˈʌn hˈʌndɹəd pəɹsˈɛnt"),
        ("naïve café Łódź", "nIˈiv kæfˈA lˈɑdz"),
        ("hi 😀 there", "hˈI ðˈɛɹ"),
        ("好。Hello，there！", ". həlˈO, ðˈɛɹ!"),
    ],
)
def test_sentences_are_read(text: str, phonemes: str) -> None:
    assert str(read(text)) == phonemes


def test_british_english_is_another_reading() -> None:
    assert str(read("The bath water.")) == "ðə bˈæθ wˈɔTəɹ."
    assert str(read("The bath water.", "uk")) == "ðə bˈɑːθ wˈɔːtə."


def test_words_keep_their_places() -> None:
    spoken = NORMALIZE("Meet 你好 at 5, OK?")
    phonemes = PHONEMIZER(spoken)
    words = [spoken.text[slice(*word.spoken)] for word in phonemes.words]
    assert words == ["Meet", "at", "five,", "okay?"]
    assert [spoken.text[slice(*span)] for span in phonemes.unspoken] == ["你好"]


@pytest.mark.parametrize("text", ["你好", "привет, мир!", "…", "日本語。"])
def test_what_has_no_sound_is_silent(text: str) -> None:
    phonemes = read(text)
    assert phonemes.is_silent
    num_letters = sum(map(str.isalpha, text))
    assert sum(end - start for start, end in phonemes.unspoken) == num_letters


def test_the_writers_own_phonemes_are_taken() -> None:
    spoken = NORMALIZE("[Kokoro](/kˈOkəɹO/), [3](/θɹˈi/) in [New York](/nu jˈɔɹk/)!")
    phonemes = PHONEMIZER(spoken)
    assert spoken.text == "Kokoro, three in New York!"
    assert str(phonemes) == "kˈOkəɹO, θɹˈi ɪn nu jˈɔɹk!"
    assert phonemes.unspoken == ()


def test_the_notation_is_in_the_source_of_its_word() -> None:
    source = "Say [GIF](/ʤˈɪf/) twice."
    spoken = NORMALIZE(source)
    (given,) = spoken.pronunciations
    assert given.phonemes == "ʤˈɪf"
    assert source[slice(*spoken.slice(*given.spoken).source)] == "[GIF](/ʤˈɪf/)"
    for word in ("Say", "twice."):
        at = spoken.text.index(word)
        assert source[slice(*spoken.slice(at, at + len(word)).source)] == word
    assert spoken.source == Span(0, len(source))
    halves = spoken.slice(0, 4), spoken.slice(4, len(spoken.text))
    assert [len(half.pronunciations) for half in halves] == [0, 1]
    assert halves[0].source.end == halves[1].source.start


@pytest.mark.parametrize("text", ["[a](b)", "[a](/b)", "[](/x/)", "[a] (/b/)", "a](/b/)"])
def test_what_only_looks_like_the_notation_is_read_as_text(text: str) -> None:
    assert NORMALIZE(text).pronunciations == ()


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab A.,'\"-—你é😀()[]/ˈ\n3$"), max_size=40))
def test_whatever_is_written_is_read_or_reported(text: str) -> None:
    spoken = NORMALIZE(text)
    phonemes = PHONEMIZER(spoken)
    ends = [span for word in phonemes.words for span in word.spoken]
    assert ends == sorted(ends)
    lost = {at for span in phonemes.unspoken for at in range(*span)}
    kept = {at for word in phonemes.words for at in range(*word.spoken)}
    letters = {at for at, char in enumerate(spoken.text) if char.isalpha()}
    assert letters <= lost | kept
    assert set(str(phonemes)) <= set(VOCABULARY)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["[a b](/ə/)", "word ", "3", ". ", "[", "](/", "/)", "[$5](/fˈIv/)", "\n\n"]
        ),
        max_size=8,
    ).map("".join)
)
def test_notations_leave_the_map_to_the_source_whole(text: str) -> None:
    spoken = NORMALIZE(text)
    assert spoken.source == Span(0, len(text)) or not spoken.segments
    for before, after in zip(spoken.segments, spoken.segments[1:], strict=False):
        assert before.spoken.end == after.spoken.start
        assert before.source.end == after.source.start
    for segment in spoken.segments:
        if segment.is_aligned:
            assert len(range(*segment.source)) == len(range(*segment.spoken))


def test_threads_may_share_a_phonemizer() -> None:
    shared = Phonemizer()
    shared.warm("uk")
    texts = [f"Sentence {number} of the reading." for number in range(12)] * 2
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: str(shared(NORMALIZE(text), "uk")), texts))
    assert together == [str(read(text, "uk")) for text in texts]


def test_the_network_is_loaded_with_the_first_unknown_word_and_torch_never() -> None:
    code = """
import sys
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.phonemes import Phonemizer
read, normalize = Phonemizer(), Normalizer()
assert "hibari" not in sys.modules
read(normalize("The quick brown fox."))
assert "onnxruntime" not in sys.modules
read(normalize("A blorptastic fox."))
assert "onnxruntime" in sys.modules
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", ["a-", "aB", "aB-"])
def test_a_word_without_end_takes_no_more_work_for_each_letter(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    reader = PHONEMIZER._reader("us")
    look_up, num_lookups = reader.lexicon, 0

    def count(*args: object) -> object:
        nonlocal num_lookups
        num_lookups += 1
        return look_up(*args)

    monkeypatch.setattr(reader, "lexicon", count)

    def work(num_characters: int) -> int:
        before = num_lookups
        assert read((part * num_characters)[:num_characters]).words
        return num_lookups - before

    assert 0 < work(480) <= 2.2 * work(240)
