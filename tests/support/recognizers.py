"""Tiny recognizers of every family on transformers' classes: random weights, a few tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from triptych.core.text.byte_level import LETTERS
from triptych.core.weights.resolve import ResolvedModel

_CONFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
    "conv_kernel_size": 5,
    "max_position_embeddings": 512,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
}
_WORDS = [f"\u2581{a}{b}" for a in "bdfg" for b in "aeiou"] + [*"aeioubdfg", ".", ",", "\u2581"]


def _pieces(*specials: str) -> Tokenizer:
    """Syllables as SentencePiece has them, after special tokens."""
    first = ["<unk>", "<s>", "</s>", *specials]
    tokenizer = Tokenizer(
        Unigram([(word, -float(n)) for n, word in enumerate([*first, *_WORDS])], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in first])
    return tokenizer


def _bytes(*specials: str) -> Tokenizer:
    """A token for each byte, and special tokens."""
    first = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: n for n, token in enumerate([*first, *LETTERS.values()])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (*first, *specials)]
    )
    return tokenizer


def _wrapped(kind: Any, tokenizer: Tokenizer, **more: Any) -> Any:
    return kind(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        **{"pad_token": "<unk>", **more},
    )


def _parakeet(head: str) -> tuple[Any, ...]:
    tokenizer = _pieces("<pad>", "<blank>") if head != "CTC" else _pieces("<pad>")
    size = tokenizer.get_vocab_size()
    fast = _wrapped(transformers.ParakeetTokenizer, tokenizer, pad_token="<pad>")
    features = transformers.ParakeetFeatureExtractor(feature_size=16)
    processor = transformers.ParakeetProcessor(features, fast)
    more = {"decoder_hidden_size": 24, "blank_token_id": 4, "num_decoder_layers": 2}
    config = getattr(transformers, f"Parakeet{head}Config")(
        encoder_config=_CONFORMER,
        vocab_size=size,
        pad_token_id=3,
        **({} if head == "CTC" else more),
    )
    network = getattr(transformers, f"ParakeetFor{head}")(config)
    if head != "CTC":
        network.generation_config.decoder_start_token_id = 4
    if head == "TDT":  # spans are no tokens
        network.generation_config.suppress_tokens = list(range(size, size + 5))
    return network, processor


def _lasr() -> tuple[Any, ...]:
    tokenizer = _pieces()
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    config = transformers.LasrCTCConfig(
        encoder_config=_CONFORMER, vocab_size=tokenizer.get_vocab_size(), pad_token_id=0
    )
    features = transformers.LasrFeatureExtractor(feature_size=16)
    return transformers.LasrForCTC(config), transformers.LasrProcessor(features, fast)


def _granite_ctc() -> tuple[Any, ...]:
    tokenizer = _pieces()
    size = tokenizer.get_vocab_size()
    features = transformers.GraniteSpeech5FeatureExtractor()
    encoder = {
        **_TOWER,
        "num_mel_bins": 80,
        "vocab_size": size,
        "num_hidden_layers": 4,
        "context_size": 16,
        "max_position_embeddings": 32,
    }
    config = transformers.GraniteSpeech5CTCConfig(
        encoder_config=encoder, vocab_size=size, pad_token_id=0
    )
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    processor = transformers.GraniteSpeech5Processor(features, fast)
    return transformers.GraniteSpeech5ForCTC(config), processor


def _raw_samples() -> Any:
    return transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)


def _moonshine() -> tuple[Any, ...]:
    tokenizer = _pieces()
    config = transformers.MoonshineConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
    )
    features = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    processor = transformers.Wav2Vec2Processor(
        features, _wrapped(PreTrainedTokenizerFast, tokenizer)
    )
    return transformers.MoonshineForConditionalGeneration(config), processor


def _moonshine_streaming() -> tuple[Any, ...]:
    tokenizer = _pieces()
    encoder = {key: value for key, value in _TOWER.items() if key != "num_mel_bins"}
    config = transformers.MoonshineStreamingConfig(
        encoder_config={
            **encoder,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_windows": [[16, 4], [16, 0]],
        },
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        decoder_start_token_id=1,
    )
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    processor = transformers.MoonshineStreamingProcessor(_raw_samples(), fast)
    return transformers.MoonshineStreamingForConditionalGeneration(config), processor


_CANARY_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'text' %}<|startofcontext|>"
    "<|{{ part.source_language }}|><|{{ part.target_language }}|>{% endif %}{% endfor %}"
)


def _canary() -> tuple[Any, ...]:
    tokenizer = _pieces("<|startofcontext|>", "<|en|>", "<|de|>")
    size = tokenizer.get_vocab_size()
    decoder = {**_TEXT, "vocab_size": size, "num_key_value_heads": 4}
    config = transformers.CanaryConfig(
        encoder_config={**_CONFORMER, "model_type": "parakeet_encoder", "scale_input": False},
        decoder_config={**decoder, "max_position_embeddings": 512},
        vocab_size=size,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=3,
    )
    features = transformers.ParakeetFeatureExtractor(feature_size=16)
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    processor = transformers.CanaryProcessor(features, fast, chat_template=_CANARY_TEMPLATE)
    return transformers.CanaryForConditionalGeneration(config), processor


def _cohere() -> tuple[Any, ...]:
    names = "startofcontext startoftranscript emo:undefined en de pnc noitn notimestamp nodiarize"
    tokenizer = _pieces(*(f"<|{name}|>" for name in names.split()))
    decoder = {**_TEXT, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = transformers.CohereAsrConfig(
        encoder_config={**_CONFORMER, "model_type": "parakeet_encoder", "scale_input": False},
        vocab_size=tokenizer.get_vocab_size(),
        decoder_start_token_id=tokenizer.token_to_id("\u2581"),
        **decoder,
    )
    features = transformers.CohereAsrFeatureExtractor(feature_size=16)
    processor = transformers.CohereAsrProcessor(
        features, _wrapped(PreTrainedTokenizerFast, tokenizer)
    )
    return transformers.CohereAsrForConditionalGeneration(config), processor


_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<audio>{% elif part.type == 'language' %}({{ part.language }})"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _qwen3() -> tuple[Any, ...]:
    tokenizer = _bytes("<audio>", "<audio_start>", "<audio_end>", "<asr_text>")
    size = tokenizer.get_vocab_size()
    tower = {**_TOWER, "output_dim": 32, "downsample_hidden_size": 8}
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        del tower[name]
    config = transformers.Qwen3ASRConfig(
        audio_config={
            **tower,
            "model_type": "qwen3_asr_encoder",
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "n_window_infer": 200,
        },
        text_config={**_TEXT, "model_type": "qwen3", "vocab_size": size},
        audio_token_id=tokenizer.token_to_id("<audio>"),
        eos_token_id=2,
        pad_token_id=0,
    )
    fast = _wrapped(
        PreTrainedTokenizerFast,
        tokenizer,
        audio_token="<audio>",
        audio_bos_token="<audio_start>",
        audio_eos_token="<audio_end>",
    )
    features = transformers.Qwen3ASRFeatureExtractor(feature_size=16)
    processor = transformers.Qwen3ASRProcessor(features, fast, chat_template=_CHAT_TEMPLATE)
    return transformers.Qwen3ASRForConditionalGeneration(config), processor


def _fun_asr() -> tuple[Any, ...]:
    tokenizer = _bytes("<audio>")
    audio = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = transformers.FunAsrNanoConfig(
        audio_config={**audio, "num_hidden_layers": 2, "num_mel_bins": 80},
        adaptor_config={
            **audio,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "projector_hidden_size": 40,
        },
        text_config={**_TEXT, "model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size()},
        audio_token_id=tokenizer.token_to_id("<audio>"),
    )
    features = transformers.FunAsrNanoFeatureExtractor()
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    processor = transformers.FunAsrNanoProcessor(
        features, fast, chat_template=_CHAT_TEMPLATE, audio_token="<audio>"
    )
    return transformers.FunAsrNanoForConditionalGeneration(config), processor


def _glm() -> tuple[Any, ...]:
    tokenizer = _bytes("<audio>")
    config = transformers.GlmAsrConfig(
        audio_config={**_TOWER, "model_type": "glmasr_encoder", "intermediate_size": 128},
        text_config={**_TEXT, "model_type": "llama", "vocab_size": tokenizer.get_vocab_size()},
        audio_token_id=tokenizer.token_to_id("<audio>"),
    )
    features = transformers.WhisperFeatureExtractor(feature_size=16)
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    processor = transformers.GlmAsrProcessor(
        features, fast, chat_template=_CHAT_TEMPLATE, audio_token="<audio>"
    )
    return transformers.GlmAsrForConditionalGeneration(config), processor


def _granite(plus: str = "") -> tuple[Any, ...]:
    tokenizer = _bytes("<|audio|>")
    encoder = {
        "hidden_dim": 32,
        "num_layers": 4,
        "num_heads": 2,
        "input_dim": 160,
        "output_dim": 12,
        "context_size": 16,
        "max_pos_emb": 32,
    }
    cat = {"cat_hidden_layers": [1]} if plus else {}
    config = getattr(transformers, f"GraniteSpeech{plus}Config")(
        encoder_config={**encoder, **cat},
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "encoder_hidden_size": 64 if plus else 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 48,
        },
        text_config={
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "granite",
            "vocab_size": tokenizer.get_vocab_size(),
        },
        audio_token_id=tokenizer.token_to_id("<|audio|>"),
        has_lora_adapter=False,
    )
    features = transformers.GraniteSpeechFeatureExtractor()
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    fast.chat_template = _CHAT_TEMPLATE
    processor = transformers.GraniteSpeechProcessor(features, fast)
    kind = getattr(transformers, f"GraniteSpeech{plus}ForConditionalGeneration")
    return kind(config), processor


def _voxtral() -> tuple[Any, ...]:
    tokenizer = _bytes("[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]")
    config = transformers.VoxtralConfig(
        audio_config={
            **_TOWER,
            "model_type": "voxtral_encoder",
            "intermediate_size": 128,
            "max_source_positions": 100,
        },
        text_config={**_TEXT, "model_type": "llama", "vocab_size": tokenizer.get_vocab_size()},
        audio_token_id=tokenizer.token_to_id("[AUDIO]"),
    )
    features = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    fast = _wrapped(PreTrainedTokenizerFast, tokenizer)
    return transformers.VoxtralForConditionalGeneration(config), features, fast


BUILDERS: Mapping[str, Callable[[], tuple[Any, ...]]] = {
    "parakeet_ctc": lambda: _parakeet("CTC"),
    "parakeet_rnnt": lambda: _parakeet("RNNT"),
    "parakeet_tdt": lambda: _parakeet("TDT"),
    "lasr_ctc": _lasr,
    "granite_speech5_ctc": _granite_ctc,
    "moonshine": _moonshine,
    "moonshine_streaming": _moonshine_streaming,
    "canary": _canary,
    "cohere_asr": _cohere,
    "qwen3_asr": _qwen3,
    "fun_asr_nano": _fun_asr,
    "glmasr": _glm,
    "voxtral": _voxtral,
    "granite_speech": _granite,
    "granite_speech_plus": lambda: _granite("Plus"),
}
"""A random network and its processor, or the parts of one, by `model_type`."""


def write_recognizer(family: str, folder: Path, *, seed: int = 0) -> ResolvedModel:
    """A tiny model of a family as a folder that transformers reads, too."""
    torch.manual_seed(seed)
    network, *parts = BUILDERS[family]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in network.named_parameters():  # lively: each window has another text
            is_gain = value.ndim == 1 and "norm" in name and name.endswith("weight")
            scale = 0.2 if value.ndim < 2 else 1.5 * value[0].numel() ** -0.5
            value.copy_(is_gain + scale * torch.randn(value.shape, generator=generator))
    network.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    return ResolvedModel(name="ears", reference="ears", folder=str(folder), digest="ab" * 32)
