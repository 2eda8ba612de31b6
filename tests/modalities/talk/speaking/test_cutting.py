"""Pieces of an answer: where they end, what is left out, and that they tile the answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.talk.speaking.cutting import MAX_PIECE, AnswerCutter, AnswerPiece
from triptych.modalities.tts.api.text.spoken import Boundary

ANSWER = """The capital of France is Paris, and it has about 2.1 million people. Dr. Smith lives\
 at 5 Main St. in Paris. See [the docs. Really](https://a.b/c) for `x. Y` more!

# Heading
1. Boil water.
2. Add tea.

```python
print("hi. there")
```

| a | b |
|---|---|
| 1 | 2. |

Done \N{GRINNING FACE}. **Be careful. It is hot.** Bye
"""


def cut(text: str, size: int, num_urgent: int = 1) -> list[tuple[AnswerPiece, int]]:
    """The pieces, each with the number of characters that were written when it came."""
    cutter, found = AnswerCutter(), []
    for at in range(0, len(text), size):
        cutter.push(text[at : at + size])
        while piece := cutter.next(is_urgent=len(found) < num_urgent):
            found.append((piece, at + size))
    while piece := cutter.next(is_urgent=False, is_last=True):
        found.append((piece, len(text)))
    return found


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_sentences_are_cut_and_blocks_are_whole(size: int) -> None:
    pieces = [piece for piece, _ in cut(ANSWER, size, num_urgent=0)]
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert [piece.text.strip() for piece in pieces if piece.is_spoken] == [
        "The capital of France is Paris, and it has about 2.1 million people.",
        "Dr. Smith lives at 5 Main St. in Paris.",
        "See [the docs. Really](https://a.b/c) for `x. Y` more!",
        "# Heading",
        "1. Boil water.",
        "2. Add tea.",
        "| a | b |\n|---|---|\n| 1 | 2. |",
        "Done \N{GRINNING FACE}.",
        "**Be careful.",
        "It is hot.** Bye",
    ]


def test_the_first_piece_is_a_clause_or_some_words() -> None:
    (first, written), *_ = cut(ANSWER, 1)
    assert first == AnswerPiece("The capital of France is Paris, ", Boundary.CLAUSE)
    assert written == len(first.text) + 1
    words = "The quick brown fox jumps over the lazy dog and then it runs on through the forest"
    (first, written), *_ = cut(words, 1)
    assert first == AnswerPiece("The quick brown fox jumps over the lazy dog ", Boundary.WORD)
    assert written < 60


def test_a_long_sentence_ends_somewhere() -> None:
    text = "word " * 1000 + "x" * 2000
    pieces = [piece for piece, _ in cut(text, 7)]
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= MAX_PIECE


def test_a_table_is_spoken_once_it_is_written() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    found = cut(f"{table}\nAnd so on. Then more.", 1)
    assert found[0] == (AnswerPiece(table, Boundary.PARAGRAPH), len(table) + 1)


def test_pipes_in_prose_hold_nothing_up() -> None:
    pieces = cut("Use a | b here. And then that is all. " * 3, 1)
    assert len(pieces) == 6
    assert pieces[0][1] < 60


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", " ", "\n", "`", "```", "|", "-", ". ", "[x](", ")", "~~~", "é"])
    ),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_pieces_tile_any_answer(parts: list[str], size: int, num_urgent: int) -> None:
    text = "".join(parts)
    found = cut(text, size, num_urgent)
    assert "".join(piece.text for piece, _ in found) == text
    assert all(piece.text for piece, _ in found)
