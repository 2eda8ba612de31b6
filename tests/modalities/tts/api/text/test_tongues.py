"""Texts in other languages than English: their numbers and signs, and their sounds."""

# ruff: noqa: E501, RUF001
from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.tts.api.text import phonemes as reading_module
from triptych.modalities.tts.api.text import readers
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.phonemes import Phonemizer
from triptych.modalities.tts.api.text.readers import OPENERS, Reader, kana_sounds
from triptych.modalities.tts.api.text.spoken import Span
from triptych.modalities.tts.api.text.tongues import Reading, reading_of, tongue
from triptych.modalities.tts.configs.kokoro import VOCABULARY

PHONEMIZER = Phonemizer()
SPELLED: tuple[Reading, ...] = ("es", "fr", "hi", "it", "pt")


def normalize(text: str, reading: Reading) -> str:
    return Normalizer(NormalizeOptions(dialect=reading))(text).text


@pytest.mark.parametrize(
    ("tag", "reading"),
    [
        ("en", "us"),
        ("en_GB", "uk"),
        ("en-AU", "us"),
        ("es-MX", "es"),
        ("fr-CA", "fr"),
        ("pt", "pt"),
        ("zh-Hans", "zh"),
        ("pt-PT", None),
        ("de", None),
        ("", None),
    ],
)
def test_a_tag_names_a_reading(tag: str, reading: Reading | None) -> None:
    assert reading_of(tag) == reading


@pytest.mark.parametrize(
    ("reading", "text", "words"),
    [
        (
            "es",
            "A las 8:30, 12,50 € y 100%.",
            "A las ocho treinta, doce coma cincuenta euros y cien por ciento.",
        ),
        ("es", "1.250.031 y -5", "un millón doscientos cincuenta mil treinta y uno y menos cinco"),
        (
            "es",
            "El 3/4/2024, 007 y $5",
            "El tres cuatro dos mil veinticuatro, cero cero siete y cinco dólares",
        ),
        (
            "fr",
            "71, 80 et 1\u202f995,3 km",
            "soixante-et-onze, quatre-vingts et mille neuf cent quatre-vingt-quinze virgule trois kilomètres",
        ),
        ("it", "28 anni, 3.500 euro", "ventotto anni, tre mila cinque cento euro"),
        ("pt", "121 casas e 1.001", "cento e vinte e um casas e mil e um"),
        ("hi", "1,25,000 और ३", "एक लाख पच्चीस हज़ार और तीन"),
        ("zh", "1005人，2024年，50%", "一千零五 人，二零二四 年，百分之五十"),
        ("ja", "1,005人", "1005人"),
        ("es", "10 20 30", "diez veinte treinta"),
        ("es", "21.000, 31.001 y 101.000", "veintiún mil, treinta y un mil uno y ciento un mil"),
        ("es", "121.000.000 o 21", "ciento veintiún millones o veintiuno"),
        ("es", "R$ 5 y US$ 20", "cinco reales y veinte dólares"),
        (
            "pt",
            "Custa R$ 50,00, US$20,50 ou $ 3.",
            "Custa cinquenta reais, vinte vírgula cinquenta dólares ou três dólares.",
        ),
        (
            "pt",
            "50,00 €; em 2024 R$ 1.200,00.",
            "cinquenta euros; em dois mil e vinte e quatro mil e duzentos reais.",
        ),
        ("pt", "R$ e 2,00 m", "reais e dois vírgula zero zero m"),
        ("zh", "¥50.00", "五十 元"),
        ("hi", "2/3", "दो बटा तीन"),
        ("hi", "वह बच्ची\n\nघर", "वह बच्ची. घर"),
        ("ja", "1 2 3 4 5 6", "1 2 3 4 5 6"),
    ],
)
def test_numbers_and_signs_are_words(reading: Reading, text: str, words: str) -> None:
    assert normalize(text, reading) == words


@pytest.mark.parametrize("reading", [*SPELLED, "zh"])
def test_cardinals_are_on_one_line(reading: Reading) -> None:
    cardinal = tongue(reading).numbers.cardinal
    words = [cardinal(n) for n in range(1_000)]
    assert words == [" ".join(each.split()) for each in words]
    assert len(set(words)) == 1_000


@pytest.mark.parametrize(
    ("reading", "text", "sounds"),
    [
        ("es", "el perro pero un vino y la vaca", "el pˈero peɾo un bˈino i la βˈaka"),
        ("es", "PDF", "pˈe ðˈe ˈefe"),
        ("fr", "l'eau, c'est un ami; aujourd'hui", "lˈo, sɛt œ̃n amˈi; oʒˈuʁdɥˈi"),
        ("fr", "ils parlent souvent", "il pˈaʁl suvˈɑ̃"),
        (
            "it",
            "l'amico capì la fisica e la tecnologia",
            "lamˈiko kapˈi la fˈizika e la teknoloʤˈia",
        ),
        ("pt", "a mãe e o pão", "a mˈɐ̃y i ʊ pˈɐ̃ʊ̃"),
        ("hi", "खरीदेंगे Google", "kʰəɾiːdˈeːŋɡeː ɡˈuɡᵊl"),
    ],
)
def test_spelling_tells_the_sound(reading: Reading, text: str, sounds: str) -> None:
    spoken = Normalizer(NormalizeOptions(dialect=reading))(text)
    assert str(PHONEMIZER(spoken, reading)) == sounds


def test_kana_are_read_with_their_neighbours() -> None:
    words = ["キョー", "ワ", "シンブン", "ガッコー", "フィルム", "ホン", "ガ"]
    assert kana_sounds(words) == [
        "kʲoː",
        "βa",
        "ɕimbɯŋ",
        "ɡaʔkoː",
        "ɸʲirɯmɯ".replace("r", "ɾ"),
        "hoŋ",
        "ɡa",
    ]


def test_words_of_a_script_without_spaces_keep_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(text: str) -> list[tuple[Span, str]]:
        words = {"你好": "ni↓xau↓", "世界": "ʂɨ↘ʨje↘"}
        return [
            (Span(text.index(word), text.index(word) + 2), sound)
            for word, sound in words.items()
            if word in text
        ]

    def reader(_: Reading) -> Reader:
        return lambda text: iter(cut(text))

    monkeypatch.setattr(reading_module, "_script_reader", reader)
    spoken = Normalizer(NormalizeOptions(dialect="zh"))("你好，（世界）Google 嗎！")
    read = PHONEMIZER(spoken, "zh")
    words = [spoken.text[slice(*word.spoken)] for word in read.words]
    assert words == ["你好，", "(世界)", "Google", "嗎！"]
    assert str(read) == "ni↓xau↓, (ʂɨ↘ʨje↘) ɡˈuɡᵊl !"
    assert [spoken.text[slice(*span)] for span in read.unspoken] == ["嗎"]


def test_a_character_without_known_pinyin_is_unspoken_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def word2ipa(word: str) -> str:
        if "嗧" in word:
            raise ValueError("Parameter 'normal_pinyin': Final couldn't be detected!")
        return f"<{word}\u032f>"

    def cut(text: str) -> list[str]:
        return [text[:1], *([text[1:]] if text[1:] else [])]

    tokenizer = SimpleNamespace(initialize=lambda: None, lcut=cut)
    jieba = SimpleNamespace(setLogLevel=lambda _: None, Tokenizer=lambda: tokenizer)
    misaki = SimpleNamespace(ZHG2P=SimpleNamespace(word2ipa=word2ipa))
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    monkeypatch.setitem(sys.modules, "misaki", SimpleNamespace(zh=misaki))
    monkeypatch.setitem(sys.modules, "misaki.zh", misaki)
    read = OPENERS["zh"]()
    assert list(read("一加嗧油，嗧")) == [
        (Span(0, 1), "<一>"),
        (Span(1, 2), "<加>"),
        (Span(3, 4), "<油>"),
    ]


@pytest.mark.parametrize("lacking", ["misaki", "ordered_set"])
def test_a_language_names_its_extra_where_a_module_is_lacking(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(readers, "find_spec", lambda name: None if name == lacking else object())
    assert readers.missing_extra("zh") == "mandarin"
    assert readers.missing_extra("ja") is None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SPELLED), st.text(st.sampled_from("aeiéãñçglnhrs quy'-,.9 नम्ािं़"), max_size=24)
)
def test_whatever_is_written_is_read_in_the_alphabet_or_reported(
    reading: Reading, text: str
) -> None:
    spoken = Normalizer(NormalizeOptions(dialect=reading))(text)
    read = PHONEMIZER(spoken, reading)
    ends = [span for word in read.words for span in word.spoken]
    assert ends == sorted(ends)
    lost = {at for span in read.unspoken for at in range(*span)}
    kept = {at for word in read.words for at in range(*word.spoken)}
    assert {at for at, char in enumerate(spoken.text) if char.isalpha()} <= lost | kept
    assert set(str(read)) <= set(VOCABULARY)


@pytest.mark.parametrize("reading", SPELLED)
def test_rules_stay_within_the_alphabet(reading: Reading) -> None:
    spelling = tongue(reading).spelling
    assert spelling is not None
    sounds = [*(sound for _, sound in spelling.rules), *spelling.words.values()]
    assert set("".join(sounds)) <= set(VOCABULARY)
