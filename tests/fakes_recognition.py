"""A recogniser small enough for tests: random weights, bytes for words, seconds for windows."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import WhisperConfig, WhisperForConditionalGeneration

from triptych.core.speech import HearDelta, HeardSegment, HeardToken, HearRequest
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.audio.resampling import Pcm
from triptych.modalities.tts.recognition.convert import ranked_tokenizer
from triptych.modalities.tts.recognition.hearing import Hearing
from triptych.modalities.tts.recognition.spec import SAMPLE_RATE, WhisperSpec

WINDOW_S = 3
LIVELINESS = 4
END, START, ENGLISH, NO_TIMESTAMPS = 256, 257, 258, 362
TRANSLATE, TRANSCRIBE = 357, 358
FIRST_TIME = NO_TIMESTAMPS + 1
CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": FIRST_TIME + 50 * WINDOW_S + 1,
    "num_mel_bins": 20,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_source_positions": 50 * WINDOW_S,
    "max_target_positions": 64,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "tie_word_embeddings": True,
    "median_filter_width": 7,
}
GENERATION: dict[str, Any] = {
    "alignment_heads": [[1, 0], [1, 1]],
    "begin_suppress_tokens": [32, END],
    "bos_token_id": END,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "is_multilingual": False,
    "max_initial_timestamp_index": 50,
    "max_length": 64,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "pad_token_id": END,
    "prev_sot_token_id": 360,
    "return_timestamps": False,
    "suppress_tokens": [1, 2, 7, START, 359, 360, 361],
}
MULTILINGUAL: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|zh|>": 259, "<|de|>": 260},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
}


def tokenizer() -> Tokenizer:
    """A token for each byte, then Whisper's own."""
    lines = (base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))
    return ranked_tokenizer(b"\n".join(lines))


def spec(**generation: Any) -> WhisperSpec:
    """The spec of the small model."""
    return WhisperSpec.of(CONFIG, GENERATION | generation)


def random_network(seed: int = 0) -> WhisperForConditionalGeneration:
    """Weights lively enough that it says something else at every step."""
    network = WhisperForConditionalGeneration(WhisperConfig.from_dict(CONFIG)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            spread = 0.2 if value.ndim == 1 else 1.5 * value[0].numel() ** -0.5
            value.copy_(spread * torch.randn(value.shape, generator=generator))
        # All times together are rarely likelier than the likeliest text.
        network.model.decoder.embed_tokens.weight[:END].mul_(LIVELINESS)
        network.model.decoder.embed_tokens.weight[END].mul_(LIVELINESS)
    return network


def write_folder(folder: Path, *, seed: int = 0, **generation: Any) -> ResolvedModel:
    """The small model as a folder that transformers reads, too."""
    random_network(seed).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer().save(str(folder / "tokenizer.json"))
    return ResolvedModel(name="ears", reference="ears", folder=str(folder), digest="ab" * 32)


def noise(seconds: float, seed: int = 0) -> Pcm:
    """Sound that changes all the time."""
    generator = np.random.default_rng(seed)
    pitch = np.cumsum(generator.normal(0, 0.02, round(seconds * SAMPLE_RATE))) + 0.1
    sound = 0.3 * np.sin(np.cumsum(pitch)) + 0.05 * generator.normal(size=len(pitch))
    return sound.astype(np.float32)


def said(text: str, start_s: float, end_s: float, *, has_times: bool = False) -> HeardSegment:
    """A segment that spells `text` in the vocabulary of bytes, evenly spread over its time."""
    data = text.encode()
    step_s = (end_s - start_s) / max(len(data), 1)
    tokens = tuple(
        HeardToken(byte, start_s + n * step_s, start_s + (n + 1) * step_s, -0.25)
        if has_times
        else HeardToken(byte, logprob=-0.25)
        for n, byte in enumerate(data)
    )
    return HeardSegment(
        start_s=start_s,
        end_s=end_s,
        tokens=tokens,
        avg_logprob=-0.25,
        no_speech_prob=0.01,
        compression_ratio=0.8,
    )


def run(hearing: Hearing) -> list[HearDelta]:
    """Everything a hearing says, stage by stage."""
    deltas = []
    with torch.inference_mode():
        while hearing.next_stage is not None:
            if (delta := hearing.advance()) is not None:
                deltas.append(delta)
    return deltas


def hear(pcm_S: Pcm, **fields: Any) -> HearRequest:
    """A request for `pcm_S`."""
    return HearRequest(pcm=pcm_S.astype("<f4").tobytes(), **fields)


def text_ids(deltas: Sequence[HearDelta]) -> list[int]:
    """All heard tokens in order."""
    return [t.token_id for delta in deltas for s in delta.segments for t in s.tokens]
