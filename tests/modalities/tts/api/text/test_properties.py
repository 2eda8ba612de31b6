# ruff: noqa: RUF001  # typographic signs are the subject here
"""What holds for any text at all."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.tts.api.text.chunks import split_utterances
from triptych.modalities.tts.api.text.coverage import Coverage
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.sentences import split_sentences
from triptych.modalities.tts.api.text.spoken import SpokenText

SPEAKABLE_MARKS = frozenset(" .,;:!?…—-\"'()¿¡。、！？，；：・")
NORMALIZERS = [
    Normalizer(NormalizeOptions(dialect=dialect, acronyms=acronyms, emoji=emoji))
    for dialect, acronyms, emoji in (
        ("us", "spell", "drop"),
        ("us", "keep", "name"),
        ("uk", "spell", "name"),
    )
]

_WRITTEN = """
    Hello the quick, brown fox. The She said: etc. e.g. i.e. vs. Dr. Mr. St. Main J. K. A. I U.S.
    a.m. Inc. No. p. NASA FBI CEOs IEEE NOW Chapter Henry VIII IV X World War II 5 007 1,234 3.14 -7
    1999 2007 1980s '90s 21st $3.50 £2m €1,200 5¢ US$5 100USD 50% 1/2 ½ 24/7 5km/h 20°C 6'2" 10–20
    10-20 5-km 9:30pm 17:05 12:34:56 2h30m 3/4/2024 2024-03-05 March May Mar. 5, 555-123-4567 (555)
    +1 https://a.io/b?c=1 me@x.org a.pdf #TagMe @you v1.2.3 1.2.3.4 H2O CO2 C++ AT&T and/or
    x^2 10⁻³ =
    + < > & * ** _ ` ~ ( ) [ ] { } " ' — – - -- ... … ! ?! 😀 👍🏽 🇺🇸 ™ © é ﬁ ² ₂ 東京。 はい！ नमस्ते
    привет # > $ % @ / | ^
"""
TOKENS = st.sampled_from([*_WRITTEN.split(), "\\", "\u200b", "\x00", "\ud800", "e\u0301"])
WORDS = st.lists(TOKENS, max_size=16).map(" ".join)
PHRASES = st.lists(
    st.sampled_from(
        """
        Dr. Smith met Mr. Jones|on Main St. near St. Paul|J. K. Rowling wrote|in the U.S. and
        the U.K.'s CEOs|NASA, the FBI and HTML|Chapter IV, Part I of|Henry VIII|after World War II
        at 9:30 p.m. sharp|from 17:05 to 18:00 UTC|12:34:56|2h30m|on 3/4/2024|by March 5, 2024,
        2024-03-05|the 5th of May|May 5–7|in 1999|the 1980s and '90s|1250 items|10–20 km|10-20%
        $3.50|£2m|€1,200|5¢|-$5|US$20|$5/month|50%|1/2|1½|24/7|-7|007|3.14|21st|20 °C|6'2" tall
        5 km/h|3.2 GB|555-123-4567|+44 20 7946 0958|https://a.io/b?c=1|me@x.org|a.pdf|#TagMe2|@you
        v1.2.3|H2O and CO2|C++|AT&T|and/or|x^2|10⁻³|3 + 4 = 7|a < b|e.g. this|etc.|Acme Inc. and
        No. 5|pp. 3-4|"Hello," she said.|(see Fig. 3)|Wait...|What?!|Yes! — no|well-known|don't|😀
        👍🏽|🇺🇸|™|©|ﬁne café|東京。|नमस्ते|привет|**bold**|_x_|`code`|STOP IT NOW PLEASE|he/she|--help
        """.replace("\n", "|").split("|")
    ),
    max_size=8,
).map(" ".join)
LINES = st.lists(WORDS, max_size=4).flatmap(
    lambda lines: st.sampled_from(["\n", "\n\n", "\n- ", "\n1. "]).map(lambda sep: sep.join(lines))
)
GLUED = st.lists(TOKENS | st.text(max_size=3), max_size=16).map("".join)
TEXTS = WORDS | PHRASES | LINES | GLUED | st.text(max_size=40)


def _is_speakable(char: str) -> bool:
    return char.isalpha() or char in SPEAKABLE_MARKS or unicodedata.category(char)[0] == "M"


def _assert_tiles(spoken: SpokenText, source: tuple[int, int]) -> None:
    spoken_end, source_end = 0, source[0]
    for segment in spoken.segments:
        assert (segment.spoken.start, segment.source.start) == (spoken_end, source_end)
        spoken_end, source_end = segment.spoken.end, segment.source.end
        assert spoken_end >= segment.spoken.start
        assert source_end >= segment.source.start
        if segment.is_aligned:
            assert spoken_end - segment.spoken.start == source_end - segment.source.start
    assert (spoken_end, source_end) == (len(spoken.text), source[1])


@settings(max_examples=300)
@given(TEXTS, st.sampled_from(NORMALIZERS))
def test_the_offset_map_covers_both_sides_in_order(text: str, normalize: Normalizer) -> None:
    spoken = normalize(text)
    _assert_tiles(spoken, (0, len(text)))


@settings(max_examples=300)
@given(TEXTS, st.sampled_from(NORMALIZERS))
def test_only_speakable_characters_come_out(text: str, normalize: Normalizer) -> None:
    spoken = normalize(text).text
    assert [char for char in spoken if not _is_speakable(char)] == []
    assert spoken == spoken.strip()
    assert "  " not in spoken


@settings(max_examples=500)
@given(PHRASES, st.sampled_from(NORMALIZERS))
def test_spoken_text_is_spoken_as_it_is(text: str, normalize: Normalizer) -> None:
    once = normalize(text).text
    assert normalize(once).text == once


@settings(max_examples=200)
@given(TEXTS)
def test_sentences_tile_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(text[start:end] for start, end, _ in sentences) == text
    assert all(text[start:end].strip() for start, end, _ in sentences if text.strip())


@settings(max_examples=200)
@given(TEXTS, st.integers(1, 60), st.integers(1, 60))
def test_utterances_lose_and_repeat_nothing(text: str, most: int, first_most: int) -> None:
    spoken = NORMALIZERS[0](text)
    utterances = list(split_utterances(spoken, most, (first_most,)))
    assert "".join(utterance.spoken.text for utterance in utterances) == spoken.text
    at, coverage = 0, Coverage()
    for utterance in utterances:
        assert utterance.source.start == at
        _assert_tiles(utterance.spoken, utterance.source)
        at = utterance.source.end
        coverage.expect(utterance)
    if utterances:
        assert at == len(text)
    for utterance in utterances:
        coverage.speak(utterance)
    assert coverage.fraction == 1.0


@settings(max_examples=200)
@given(st.lists(st.text("abcdefgh", min_size=1, max_size=9), min_size=1), st.integers(10, 40))
def test_utterances_keep_to_the_limit(words: list[str], most: int) -> None:
    spoken = NORMALIZERS[0](" ".join(words))
    for utterance in split_utterances(spoken, most):
        assert len(utterance.text) <= most
        assert utterance.text
