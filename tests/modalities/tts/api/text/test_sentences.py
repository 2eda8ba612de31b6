# ruff: noqa: RUF001  # typographic signs are the subject here
import pytest

from triptych.modalities.tts.api.text.sentences import split_sentences
from triptych.modalities.tts.api.text.spoken import Boundary


def _parts(text: str) -> list[str]:
    return [text[start:end].strip() for start, end, _ in split_sentences(text)]


@pytest.mark.parametrize(
    "marked",
    [
        "One. | Two! | Three? | Four",
        "Dr. Smith and Mr. Jones met Prof. X. | They talked.",
        "It costs $3.50. | Cheap at 1.5 times that.",
        "See e.g. Smith. | Also i.e. that. | And so on, etc. | Then more.",
        "He lives in the U.S. | The end.",
        "The U.S. Army. | J. K. Rowling wrote. | W. B. Yeats too.",
        "The F B I. | John left.",
        "On Jan. 5 we met. | In Feb. | The rest is known.",
        "We met at 5 p.m. | Then we left at 6 p.m. sharp.",
        "Acme Inc. is big. | It works for Acme Inc. | The rest do not.",
        "No. 5 is alive. | No. | See p. 3.",
        '"Really?" he asked. | "Yes!" | She nodded.',
        "(He left.) | She stayed.",
        "Wait... what? | Wait... | What?",
        "Well… maybe. | Or… | Never.",
        "Main St. is closed. | St. Paul is open.",
        "Yahoo! is a company.",
        "What?! | No!!! | Why...",
        "日本語です。 | これは？ | はい！ | 終わり",
        "「はい。」 | そう。",
        "Mixed end.Next stays.",
        "a@b.com and 10.0.0.1 stay. | See www.x.org. | Done.",
    ],
)
def test_splits_at_the_bars(marked: str) -> None:
    parts = marked.split(" | ")
    joiner = "" if "。" in marked else " "
    assert _parts(joiner.join(parts)) == parts


def test_lists_and_paragraphs_are_hard_ends() -> None:
    text = "Title\n\nWe need:\n- eggs\n- milk\n1. bread. Fresh\n2) water\nand\nwine"
    assert _parts(text) == [
        "Title",
        "We need:",
        "- eggs",
        "- milk",
        "1. bread.",
        "Fresh",
        "2) water\nand\nwine",
    ]
    ends = [sentence.boundary for sentence in split_sentences(text)]
    assert ends.count(Boundary.SENTENCE) == 1
    assert ends[4] is Boundary.SENTENCE


def test_a_blank_line_after_a_sentence_ends_the_paragraph() -> None:
    assert [s.boundary for s in split_sentences("One. Two.\n\nThree.")] == [
        Boundary.SENTENCE,
        Boundary.PARAGRAPH,
        Boundary.SENTENCE,
    ]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", ".", "no end", "\n\n a. \n\n"])
def test_spans_tile_degenerate_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(text[start:end] for start, end, _ in sentences) == text
