"""Nothing broken and nothing secret ever comes out of the detokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.text_models import byte_tokenizer
from triptych.core.engine_api.tokens import TokenLogprob
from triptych.modalities.llm.api.detokenizer import Detokenizer, StopFilter

TOKENIZER = byte_tokenizer()
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def pieces(text: str, stops: tuple[str, ...], sizes: list[int]) -> tuple[list[str], str | None]:
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER, (), stops)
    out, at = [], 0
    for size in [*sizes, len(ids)]:
        piece, _ = detokenizer.push(ids[at : at + size], ())
        out.append(piece)
        if detokenizer.stop is not None:
            return out, detokenizer.stop
        at += size
    out.append(detokenizer.flush()[0])
    return out, None


@given(TEXT, st.lists(st.integers(0, 5), max_size=30))
def test_any_split_of_the_tokens_gives_the_same_text(text: str, sizes: list[int]) -> None:
    out, stop = pieces(text, (), sizes)
    assert "".join(out) == text
    assert stop is None


@given(st.text("aé🎉€", min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=30))
def test_no_piece_holds_half_a_character(text: str, sizes: list[int]) -> None:
    out, _ = pieces(text, (), sizes)
    assert all("�" not in piece for piece in out)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), max_size=30),
)
def test_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    out, stop = pieces(text, tuple(stops), sizes)
    shown = "".join(out)
    assert text.startswith(shown)
    if stop is None:
        assert shown == text
        assert not any(s in text for s in stops)
    else:
        assert stop in stops
        assert text[len(shown) :].startswith(stop)
        # No other stop string completed earlier in what the filter had seen.
        assert not any(s in shown for s in stops)


def test_a_stop_prefix_is_held_until_it_is_decided() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("the EN") == ("the ", None)
    assert stop_filter.push("TRY") == ("ENTRY", None)
    assert stop_filter.push(" END of") == (" ", "END")


def test_held_text_comes_out_when_the_row_ends() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("the EN") == ("the ", None)
    assert stop_filter.flush() == "EN"
    assert stop_filter.flush() == ""


def test_half_a_character_at_the_end_is_dropped() -> None:
    ids = TOKENIZER.encode("a€").ids[:-1]
    detokenizer = Detokenizer(TOKENIZER, (), ())
    assert detokenizer.push(ids, ())[0] + detokenizer.flush()[0] == "a"


def test_special_tokens_are_not_shown() -> None:
    end = TOKENIZER.token_to_id("<|im_end|>")
    ids = [*TOKENIZER.encode("hi").ids, end]
    assert Detokenizer(TOKENIZER, (), ()).push(ids, ())[0] == "hi"


@pytest.mark.parametrize("step", [1, 2, 5])
def test_logprobs_of_a_stop_string_are_not_reported(step: int) -> None:
    ids = TOKENIZER.encode("ok STOP more").ids
    detokenizer = Detokenizer(TOKENIZER, (), ("STOP",))
    reported: list[int] = []
    for at in range(0, len(ids), step):
        chunk = ids[at : at + step]
        _, logprobs = detokenizer.push(chunk, [TokenLogprob(i, -1.0) for i in chunk])
        reported += [entry.token_id for entry in logprobs]
        if detokenizer.stop:
            break
    assert TOKENIZER.decode(reported) == "ok "


def test_every_logprob_is_reported_once_when_nothing_stops() -> None:
    ids = TOKENIZER.encode("naïve ENtry 🎉").ids
    detokenizer = Detokenizer(TOKENIZER, (), ("END",))
    reported: list[int] = []
    for token_id in ids:
        _, logprobs = detokenizer.push([token_id], [TokenLogprob(token_id, -1.0)])
        reported += [entry.token_id for entry in logprobs]
    reported += [entry.token_id for entry in detokenizer.flush()[1]]
    assert reported == ids
