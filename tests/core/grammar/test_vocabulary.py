"""Tokenizers of every kind as grammars see them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.guided import allowed_ids
from support.text_models import byte_tokenizer
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.matcher import TokenMatcher
from triptych.core.grammar.source import to_grammar
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.text.token_bytes import TokenBytes

_WORDS = ("▁", "▁red", "red", "▁b", "lue", "blue", "re", "d", '{"', "na", "me", '":', "▁is", "is")


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: a space before every text, and tokens for bytes that it lacks."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS, *"abcelmnru"]
    vocab = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    merges = [("re", "d"), ("b", "lue"), ("na", "me")]
    merges = [pair for pair in merges if all(part in vocab for part in pair)]
    merges = [pair for pair in merges if "".join(pair) in vocab]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return tokenizer


def lower_cased() -> Tokenizer:
    """One that does not keep what a text says."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_like])
def test_texts_are_tokenized_in_the_midst_of_others(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    vocabulary, spell = GrammarVocabulary(tokenizer, 400), TokenBytes(tokenizer)
    assert vocabulary.is_canonical
    for text in ("red", '{"name": "é', " blue", "\n\n", "<s>"):
        assert b"".join(map(spell, vocabulary.tokenize(text))) == text.encode()


def test_forced_tokens_are_the_tokenizers_own() -> None:
    tokenizer = sentencepiece_like()
    vocabulary = GrammarVocabulary(tokenizer, 400)
    compiled = GrammarCompiler(vocabulary).compile(to_grammar("regex", "a red"))
    state = TokenMatcher(compiled, vocabulary, SamplingParams(), is_jumping=True)
    state.follow((), 0, 9)
    forced = state.follow((tokenizer.token_to_id("a"),), 1, 8).forced_ids
    assert b"".join(map(TokenBytes(tokenizer), forced)) == b" red"
    assert list(forced) == vocabulary.tokenize(" red")


def test_a_tokenizer_that_changes_texts_forces_nothing() -> None:
    vocabulary = GrammarVocabulary(lower_cased(), 300)
    assert not vocabulary.is_canonical
    compiled = GrammarCompiler(vocabulary).compile(to_grammar("regex", "red"))
    state = TokenMatcher(compiled, vocabulary, SamplingParams(), is_jumping=True)
    assert len(allowed_ids(state.follow((), 0, 9).allowed)) == 1
    assert state.follow(allowed_ids(state.follow((), 0, 9).allowed), 1, 8).forced_ids == ()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_masks_have_a_bit_per_token_lowest_first(vocab_size: int) -> None:
    vocabulary = GrammarVocabulary(byte_tokenizer(), vocab_size)
    words = vocabulary.bits([0, vocab_size - 1])
    assert len(words) == vocabulary.num_words == -(-vocab_size // 32)
    assert allowed_ids(words.astype("<u4").tobytes()) == sorted({0, vocab_size - 1})


def test_special_and_missing_tokens_are_no_text() -> None:
    vocabulary = GrammarVocabulary(byte_tokenizer(), 300)
    assert allowed_ids(vocabulary.text_words.astype("<u4").tobytes()) == list(range(3, 259))


def test_added_tokens_are_spelled_as_they_are() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    spell = TokenBytes(tokenizer)
    assert spell(tokenizer.token_to_id("<tool call>")) == b"<tool call>"
    assert not spell.is_special(tokenizer.token_to_id("<tool call>"))
    assert spell.is_special(0)
    assert spell(100_000) == b""
