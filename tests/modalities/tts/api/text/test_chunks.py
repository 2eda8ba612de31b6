# typographic signs are the subject here
import pytest

from triptych.modalities.tts.api.text.chunks import Utterance, split_utterances
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.spoken import Boundary

normalize = Normalizer()


def _split(text: str, most: int, first_most: tuple[int, ...] = ()) -> list[Utterance]:
    return list(split_utterances(normalize(text), most, first_most))


def _texts(text: str, most: int, first_most: tuple[int, ...] = ()) -> list[str]:
    return [utterance.text for utterance in _split(text, most, first_most)]


def test_what_fits_is_one_utterance() -> None:
    (utterance,) = _split("Hello there. How are you?", 100)
    assert utterance.text == "Hello there. How are you?"
    assert utterance.source == (0, 25)
    assert utterance.boundary is Boundary.PARAGRAPH


@pytest.mark.parametrize(
    ("text", "most", "parts"),
    [
        ("One two. Three four. Five six.", 22, ["One two. Three four.", "Five six."]),
        ("One two three, four five six seven", 20, ["One two three,", "four five six seven"]),
        ("One two three four five", 10, ["One two", "three", "four five"]),
        ("A b c. D e f, g h i j k l.", 12, ["A b c.", "D e f,", "g h i j k l."]),
        ("Aaaaaaaaaa", 4, ["Aa", "aaa", "aa", "aaa"]),
        ("これは長い、とても長い文です。次。", 10, ["これは長い、", "とても長い文です。", "次。"]),
        (
            "Short.\n\nA long paragraph here. And so on.",
            36,
            ["Short. A long paragraph here.", "And so on."],
        ),
        (
            "A first paragraph here.\n\nTwo. Three four five.",
            32,
            ["A first paragraph here.", "Two. Three four five."],
        ),
    ],
)
def test_cuts_at_the_best_place(text: str, most: float, parts: list[str]) -> None:
    assert _texts(text, most) == parts


def test_what_was_written_as_one_is_cut_last() -> None:
    parts = _texts("We paid $1234.56 and left", 50)
    assert parts[0] == "We paid"
    assert parts[1].startswith("one thousand two hundred")


def test_a_cut_inside_one_token_shares_its_source() -> None:
    text = "$123,456,789.12"
    parts = _split(text, 30)
    assert len(parts) > 2
    assert [part.source.start for part in parts[1:]] == [part.source.end for part in parts[:-1]]
    assert (parts[0].source.start, parts[-1].source.end) == (0, len(text))


def test_the_first_utterance_can_be_shorter() -> None:
    text = "Well, this is a sentence that goes on. It has a second one."
    assert _texts(text, 100, first_most=(20,))[0] == "Well, this is a"[:5]
    assert len(_texts(text, 100)) == 1


def test_utterance_has_the_pause_after_it() -> None:
    text = "One. Two, three four.\n\nFive six seven eight nine ten."
    ends = [utterance.boundary for utterance in _split(text, 12)]
    assert ends[:3] == [Boundary.SENTENCE, Boundary.CLAUSE, Boundary.PARAGRAPH]
    assert ends[-1] is Boundary.PARAGRAPH


def test_no_utterance_is_silent() -> None:
    text = '😀 ... Hello! ... " ( 🎉 ) — there — 😀\n\n***\n\n— end ... ? !'
    for utterance in _split(text, 6):
        assert not utterance.spoken.is_silent


def test_silence_has_no_utterances() -> None:
    assert _split("😀", 10) == []


@pytest.mark.parametrize(("most", "first_most"), [(0, ()), (5, (-1,))])
def test_a_limit_of_nothing_is_refused(most: int, first_most: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        _split("Hello.", most, first_most)
