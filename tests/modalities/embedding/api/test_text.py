"""What the API process knows of an embedding model, and how texts become ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding

from support.embedding_models import WORDS, save_cross_encoder, save_tokenizer
from support.text_models import write_text_folder
from triptych.core.errors import InvalidRequest
from triptych.core.options.config import ModelOptions
from triptych.core.text.tokenizer import read_tokenizer
from triptych.modalities.embedding.api import text
from triptych.modalities.embedding.api.text import EmbeddingModel, PairTemplate, shorten_pair


@pytest.mark.parametrize("field", ["hidden_size", "n_embd", "d_model"])
def test_decoders_name_their_width_in_different_ways(tmp_path: Path, field: str) -> None:
    folder = write_text_folder(tmp_path, **{field: 24})
    assert EmbeddingModel.open(folder, ModelOptions()).num_dimensions == 24


def test_a_decoder_that_does_not_say_its_width_can_still_be_opened(tmp_path: Path) -> None:
    """It may be served for chat alone, so want of embeddings must not stop it."""
    model = EmbeddingModel.open(write_text_folder(tmp_path), ModelOptions())
    assert model.encode(["hi"]) == (tuple(model.reader().tokenizer.encode("hi").ids),)


@pytest.mark.parametrize(("given_text", "message"), [("", "empty"), ("\udcff", "Unicode")])
def test_what_is_no_text_is_refused(tmp_path: Path, given_text: str, message: str) -> None:
    model = EmbeddingModel.open(write_text_folder(tmp_path), ModelOptions())
    with pytest.raises(InvalidRequest, match=message):
        model.encode(["hi", given_text])


@cache
def _scorer(folder: Path) -> EmbeddingModel:
    """A cross-encoder, saved below the folder."""
    return EmbeddingModel.open(save_cross_encoder(folder / "scorer")[0], ModelOptions())


_Words = st.lists(st.sampled_from(WORDS[4:]), max_size=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@given(first=_Words, second=_Words, most=st.integers(4, 70))
def test_pairs_are_cut_as_tokenizers_do(
    folder: Path, first: list[str], second: list[str], most: int
) -> None:
    tokenizer = read_tokenizer(folder, "words")
    texts = " ".join(first), " ".join(second)
    one, two = tokenizer.encode_batch(texts, add_special_tokens=False)
    num_first, num_second = shorten_pair(len(one), len(two), most - 3)
    one.truncate(num_first)
    two.truncate(num_second)
    cut = tokenizer.post_process(one, two)
    marks = PairTemplate.of(tokenizer)
    tokenizer.enable_truncation(most, strategy="longest_first")
    wanted = tokenizer.encode(*texts)
    assert cut.ids == wanted.ids
    assert cut.type_ids == wanted.type_ids
    assert [*marks.before, *one.ids, *marks.between, *two.ids, *marks.after] == wanted.ids
    assert marks.num_of_second(len(one), len(two)) == sum(wanted.type_ids)


@given(first=_Words, second=_Words, most=st.integers(4, 64), most_of_second=st.integers(0, 20))
def test_pairs_keep_the_end_that_is_asked_for(
    folder: Path, first: list[str], second: list[str], most: int, most_of_second: int
) -> None:
    """What is kept of texts is the mirror image of what is kept of mirrored ones."""
    model = _scorer(folder)

    def kept(one: list[str], two: list[str], *, keeps_end: bool) -> list[list[int]]:
        pairs = model.encode_pairs(
            [(" ".join(one), " ".join(two))],
            max_tokens=most,
            max_document_tokens=most_of_second,
            keeps_end=keeps_end,
        )
        ids, start = pairs.token_ids[0], pairs.second_starts[0]
        return [[*ids[1 : start - 1]], [*ids[start:-1]]]

    ends = kept(first, second, keeps_end=True)
    starts = kept(first[::-1], second[::-1], keeps_end=False)
    assert ends == [ids[::-1] for ids in starts]


def test_a_pair_tells_where_its_second_text_begins(tmp_path: Path) -> None:
    model = EmbeddingModel.open(save_cross_encoder(tmp_path)[0], ModelOptions())
    pairs = [("w1 w2", "w3"), ("w1 w2", "w4 w5 w6"), ("w7", "w3")]
    found = model.encode_pairs(pairs)
    for (query, document), ids, start in zip(
        pairs, found.token_ids, found.second_starts, strict=True
    ):
        first, second = (tuple(map(WORDS.index, side.split())) for side in (query, document))
        assert ids == (1, *first, 2, *second, 2)
        assert start == len(first) + 2


def test_what_is_cut_off_a_query_is_not_copied_for_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = EmbeddingModel.open(save_cross_encoder(tmp_path)[0], ModelOptions())
    merged: list[int] = []
    merge = Encoding.merge

    class Counted:
        """Counts what is copied."""

        @staticmethod
        def merge(encodings: list[Encoding]) -> Encoding:
            merged.extend(map(len, encodings))
            return merge(encodings)

    monkeypatch.setattr(text, "Encoding", Counted)
    pairs = [("w1 " * 5000, "w3 " * n) for n in range(1, 40)]
    found = model.encode_pairs(pairs, max_tokens=16)
    assert sum(merged) <= 2 * 5000
    assert all(len(ids) == 16 for ids in found.token_ids[8:])
