"""Tokenizers out of the files that repositories have: tables of old, and SentencePiece models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import transformers
from tokenizers import pre_tokenizers

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.loading.components import open_reader

SENTENCES = ["a red apple on a table", "a penguin next to a house", "the blue car drives"]


def test_clip_needs_no_more_than_a_vocabulary_and_merges(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = [f"{letter}</w>" for letter in letters]
    tokens = [*letters, *ends, "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    tokenizer = open_reader(transformers.CLIPTokenizer, tmp_path)
    ids = tokenizer("A cat").input_ids
    assert [tokens[index] for index in ids] == ["<|startoftext|>", "a</w>", "cat</w>", tokens[-1]]
    assert tokenizer.model_max_length == 77


def test_t5_reads_a_sentencepiece_model(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(SENTENCES * 50))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=3,
    )
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    tokenizer = open_reader(transformers.T5Tokenizer, folder)
    for sentence in SENTENCES:
        assert tokenizer(sentence).input_ids == [*own.encode(sentence), 1]


@pytest.mark.parametrize("text", ["{", "{}", '{"added_tokens": [], "model": {"type": "Evil"}}'])
def test_an_unusable_folder_is_named(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer_2"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(WeightsError, match="files in tokenizer_2 are not usable as T5Tokenizer"):
        open_reader(transformers.T5Tokenizer, folder)
