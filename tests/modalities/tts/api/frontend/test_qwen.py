"""Prompts of Qwen3-TTS: voices, languages and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.qwen_tts import GOLDEN
from triptych.core.errors import InvalidRequest, UnsupportedOption, WeightsError
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.frontend.base import PlannedSegment
from triptych.modalities.tts.api.frontend.qwen import QwenFrontEnd
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer

BYTES = "".join(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write(folder: Path, **changes: Any) -> ResolvedModel:
    """A model whose tokenizer has the bytes as letters, in the files of Qwen2."""
    vocab = {letter: index for index, letter in enumerate((*BYTES, "Ġ", "Ċ"))}
    added = {
        len(vocab) + index: {
            "content": content,
            "special": True,
            **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
        }
        for index, content in enumerate(SPECIAL)
    }
    talker = {**GOLDEN["config"]["talker_config"], "text_vocab_size": 1000}
    config = {**GOLDEN["config"], "talker_config": talker, **changes}
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    files = {"config": config, "vocab": vocab, "tokenizer_config": tokenizer}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return ResolvedModel(name="q", reference="q", folder=str(folder), digest="0")


def opened(folder: Path, kind: str, **changes: Any) -> QwenFrontEnd:
    front = open_front_end(write(folder, tts_model_type=kind, **changes))
    assert isinstance(front, QwenFrontEnd)
    return front


def planned(
    front: QwenFrontEnd, text: str, voice: str, language: str = "", **asked: str
) -> PlannedSegment:
    front.check_language(language, voice)
    options = NormalizeOptions(dialect=front.reading(language, voice, text))
    instructions = asked.get("instructions", "")
    plan = front.plan(
        Normalizer(options)(text), voice=voice, instructions=instructions, language=language
    )
    (segment,) = plan
    return segment


def prompt(front: QwenFrontEnd, text: str, voice: str, language: str = "", **asked: str) -> Any:
    return planned(front, text, voice, language, **asked).segment


def texts(front: QwenFrontEnd, ids: tuple[int, ...]) -> str:
    """The text tokens of a prompt, with a bar before those that have a sign of the codec."""
    tokenizer: Any = front.tokenizer._tokenizer
    size = front.config.talker_config.text_vocab_size
    names = {60: "<pad>", 61: "<bos>", 62: "<eos>"}

    def one(token_id: int) -> str:
        if token_id < size:
            return str(tokenizer.id_to_token(token_id))
        word = token_id % size
        return "|" + (names.get(word) or tokenizer.id_to_token(word))

    return "".join(map(one, ids))


def test_a_named_voice_and_a_language_open_the_prompt(tmp_path: Path) -> None:
    front = opened(tmp_path, "custom_voice")
    assert [voice.name for voice in front.voices] == ["ada", "bob"]
    segment = prompt(front, "Hi.", "ada", "en")
    assert texts(front, segment.prompt_ids) == (
        "<|im_start|>assistantĊ|<pad>|<pad>|<pad>|<pad>|<pad>|<bos>|H|i|.|<eos>|<pad>"
    )
    signs = [token_id // 1000 - 1 for token_id in segment.prompt_ids]
    assert signs == [*[-1] * 11, 72, 74, 100, 75, 90, *[70] * 5, 71]
    assert 12 < segment.max_steps < 60
    signs = [token_id // 1000 - 1 for token_id in prompt(front, "Hi.", "ada").prompt_ids]
    assert signs[11:16] == [73, 74, 75, 90, 70]
    assert 102 in [each // 1000 - 1 for each in prompt(front, "Hi.", "bob").prompt_ids]


LANGUAGES = dict.fromkeys(("chinese", "english", "german", "korean", "russian", "spanish"), 74)


@pytest.mark.parametrize(
    ("language", "text", "spoken"),
    [
        ("de", "Das kostet 100 € am 3.4.2024.", "Das kostet 100 € am 3.4.2024."),
        ("", "Das kostet 100 € am 3.4.2024.", "Das kostet 100 € am 3.4.2024."),
        ("", "Das ist z.B. 50%/Tag (+5) auf a.de.", "Das ist z.B. 50%/Tag (+5) auf a.de."),
        ("ko", "사과 3개, 5%", "사과 3개, 5%"),
        ("", "大韓民國 사과 3개", "大韓民國 사과 3개"),
        ("ru", "Это стоит 100 рублей.", "Это стоит 100 рублей."),
        ("", "Это не the end of the 5.", "Это не the end of the 5."),
        ("es", "21.000 €", "veintiún mil euros"),
        ("", "21 ————————— (5)", "21 ————————— (5)"),
        ("de", "100", "100"),
        ("", "我用 iPhone 15", "我用 iPhone 十五"),
        ("", "Er wohnt in 北京, Haus 5.", "Er wohnt in 北京, Haus 5."),
        ("", "コーヒー5%", "コーヒー5 パーセント"),
        ("", "约翰・史密斯5", "约翰・史密斯 五"),
        ("", "これは5%です", "これは5 パーセント です"),
        ("", "The price is $5 for both of them.", "The price is five dollars for both of them."),
        ("en-AU", "Room 21", "Room twenty-one"),
    ],
)
def test_numbers_are_read_where_the_language_has_rules(
    tmp_path: Path, language: str, text: str, spoken: str
) -> None:
    talker = {**GOLDEN["config"]["talker_config"], "codec_language_id": LANGUAGES}
    front = opened(tmp_path, "custom_voice", talker_config=talker)
    segment = planned(front, text, "ada", language)
    assert segment.utterance.text == spoken
    assert not segment.is_silent
    if not language:  # a recorded voice takes none
        base = opened(tmp_path, "base", talker_config=talker)
        assert planned(base, text, "").utterance.text == spoken


def test_a_described_voice_follows_the_instructions(tmp_path: Path) -> None:
    front = opened(tmp_path, "voice_design")
    segment = prompt(front, "Hi.", "designed", instructions="calm")
    assert texts(front, segment.prompt_ids).startswith(
        "<|im_start|>userĊcalm<|im_end|>Ċ<|im_start|>assistantĊ|<pad>|<pad>|<pad>|<bos>|H"
    )


def test_a_recorded_voice_is_named_by_the_engine(tmp_path: Path) -> None:
    front = opened(tmp_path, "base")
    assert front.can_clone
    assert texts(front, front.clip_ids("Yo")) == (
        "<|im_start|>assistantĊ|<pad>|<pad>|<pad>|<pad>|<bos>|Y|o"
    )
    assert [each // 1000 - 1 for each in front.clip_ids("")][-2:] == [1056, 70]
    assert texts(front, prompt(front, "Hi.", "").prompt_ids) == "|H|i|.|<eos>"
    with pytest.raises(InvalidRequest, match="voice of a recording"):
        front.check_voice("")
    with pytest.raises(UnsupportedOption, match="leave language"):
        front.check_language("en", "")


def test_what_a_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    front = opened(tmp_path, "custom_voice", tts_model_size="0b6")
    with pytest.raises(UnsupportedOption, match="speaks en, zh, not 'fr'"):
        front.check_language("fr", "ada")
    with pytest.raises(UnsupportedOption, match="instructions"):
        prompt(front, "Hi.", "ada", instructions="calm")
    talker = {**GOLDEN["config"]["talker_config"], "spk_id": {}}
    with pytest.raises(WeightsError, match="spk_id"):
        opened(tmp_path, "custom_voice", talker_config=talker)
    with pytest.raises(WeightsError, match="qwen3_tts_tokenizer_25hz"):
        opened(tmp_path, "base", tokenizer_type="qwen3_tts_tokenizer_25hz")
