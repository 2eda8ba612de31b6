"""Speech, recognition and streaming codecs on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from agreement import Figures, check, share_apart, vectors
from engines import Answer, Waves
from model_case import FLOAT32_LIMIT, Ask, Bench, DirectCase, EngineCase, in_float32, must
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel

from support import speech_models
from support.asr import noise, transcribe_request, write_folder
from support.codec_models import random_model, randomize
from support.kokoro_models import TINY, tiny_model, write_hub_folder
from support.voice_model import save_voice
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.modalities.tts.engine.codecs import StreamingDecoder, adapter_for
from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig
from triptych.modalities.tts.engine.models.kokoro.convert import convert_hub
from triptych.modalities.tts.wire import SpeechRequest, SpeechSegment

WIDTH = 256
LIVELY = SamplingParams(temperature=0.7, top_k=8, seed=1, max_tokens=48)
SOUND_LIMIT = 5e-3
WAVE_LIMIT = 0.05
"""A phase is a sum over all samples before it."""
CODECS = ("mimi", "encodec", "dac", "xcodec", "higgs", "snac")
NUM_ROWS, NUM_FRAMES = 4, 24
CHUNKS = (1, 2, 3, 1, 5)
"""Frames of a push; the rest comes in the last."""


def speaks(prompt: Sequence[int], num_steps: int, folder: Path, voice: str = "") -> Waves:
    """Three listeners, two of whom hear two sentences."""
    first = SpeechSegment(prompt_ids=tuple(prompt), max_steps=num_steps)
    second = SpeechSegment(prompt_ids=tuple(prompt[::-1]), max_steps=num_steps, pause_s=0.05)
    return (
        [
            SpeechRequest(segments=segments, sampling=LIVELY, voice=voice, is_live=False)
            for segments in ((first, second), (first,), (second, first))
        ],
    )


def apart_in_sound(got: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """The error of samples."""
    return share_apart(vectors(got, "pcm"), vectors(wanted, "pcm"))


def audible(dtype: str) -> Callable[[Ask], Figures]:
    """Sound that is neither silence nor noise without bounds.

    Codes that are drawn from rounded numbers are soon others, so there is nothing to compare.
    """

    def compare(ask: Ask) -> Figures:
        samples = vectors(ask(dtype=dtype), "pcm")
        must(samples.size > 0 and bool(np.isfinite(samples).all()), "no sound, or not finite")
        must(float(samples.std()) > 0, "silence")
        return {"samples": samples.size, "loudness": float(samples.std())}

    return compare


def _speech(
    name: str,
    write: Callable[[Path], object],
    requests: Callable[[Path], Waves],
    compare: Callable[[Ask], Figures],
) -> EngineCase:
    options = {"max_batch_size": 4, "max_streams": 4}
    return EngineCase(name=name, write=write, requests=requests, compare=compare, options=options)


def save_kokoro(folder: Path) -> None:
    """A small Kokoro, converted as a download is."""
    published = folder.with_name("published")
    published.mkdir()
    write_hub_folder(published, tiny_model())
    convert_hub(published, TINY, folder)


# ---- recognition ---------------------------------------------------------------------------------

WHISPER = {"d_model": 128, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}


def hears(folder: Path) -> Waves:
    """Recordings of several lengths, one of them with the times of words."""
    return (
        [
            transcribe_request(noise(seconds, seed), has_word_times=seed == 1)
            for seed, seconds in enumerate((1.5, 4.0, 7.5))
        ],
    )


def said(answers: Sequence[Answer]) -> list[tuple[int, float, float]]:
    """Tokens with their times."""
    return [
        (token.token_id, token.start_s, token.end_s)
        for answer in answers
        for delta in answer
        for segment in delta.segments
        for token in segment.tokens
    ]


def equal_transcripts(ask: Ask) -> Figures:
    """Every token and every time in float32."""
    got, wanted = said(ask(dtype="float32")), said(ask(is_reference=True, dtype="float32"))
    must(got == wanted, f"{got[:8]} in the place of {wanted[:8]}")
    must(len(wanted) > 20, f"only {len(wanted)} tokens")
    return {"tokens": len(wanted)}


def some_transcript(ask: Ask) -> Figures:
    """As much is heard in bfloat16."""
    got, wanted = said(ask(dtype="bfloat16")), said(ask(is_reference=True, dtype="float32"))
    same = next(
        (place for place, (a, b) in enumerate(zip(got, wanted, strict=False)) if a[0] != b[0]),
        min(len(got), len(wanted)),
    )
    must(len(got) > 10, f"only {len(got)} tokens")
    return {"tokens": len(got), "same": same}


# ---- codecs --------------------------------------------------------------------------------------


def mimi() -> nn.Module:
    """The decoder of Mimi at its published size."""
    model: nn.Module = MimiModel(MimiConfig()).eval()
    model.encoder = nn.Identity()
    randomize(model)
    return model


def snac() -> nn.Module:
    """SNAC at its published size."""
    model = Snac(SnacConfig()).eval()
    randomize(model)
    return model


@torch.inference_mode()
def streamed(decoder: StreamingDecoder, codes_BQF: Tensor) -> Tensor:
    """All samples of rows that are pushed chunk by chunk, and flushed."""
    rows = range(len(codes_BQF))
    decoder.init_state(rows)
    parts = [*CHUNKS, codes_BQF.shape[-1] - sum(CHUNKS)]
    audio = [decoder.push(part, rows) for part in codes_BQF.split(parts, -1)]
    audio.append(decoder.flush(rows))
    return torch.stack([torch.cat([each.row(row) for each in audio]) for row in rows])


def stream(make: Callable[[], nn.Module], bench: Bench) -> Figures:
    """Chunks on the device against the whole on the CPU."""
    torch.manual_seed(0)
    model = make().float()
    reference = adapter_for(model)
    codes_BQF = reference.probe_codes(NUM_ROWS, NUM_FRAMES)
    with torch.inference_mode():
        wanted_BS = reference.one_shot(codes_BQF)
    adapter = adapter_for(model.to(bench.device))
    decoder = StreamingDecoder(adapter, num_rows=NUM_ROWS, verify=False)
    got_BS = streamed(decoder, codes_BQF.to(bench.device)).cpu()
    share = share_apart(got_BS.numpy(), wanted_BS.numpy())
    return check("float32", share, FLOAT32_LIMIT)


def _codecs() -> Sequence[DirectCase]:
    makers: dict[str, Callable[[], nn.Module]] = {
        **{name: partial(random_model, name, torch.float32) for name in CODECS},
        "mimi, published size": mimi,
        "snac, published size": snac,
    }
    return [DirectCase(f"codec, {name}", partial(stream, make)) for name, make in makers.items()]


CASES: Sequence[EngineCase | DirectCase] = (
    *(
        _speech(f"speech, {name}, {kind}", write, requests, compare)
        for name, write, requests in (
            (
                "csm",
                partial(speech_models.csm, hidden_size=WIDTH),
                partial(speaks, (3, 4, 5, 6), 12),
            ),
            (
                "higgs",
                partial(speech_models.higgs, hidden_size=WIDTH),
                partial(speaks, (3, 4, 5, 6), 20),
            ),
            (
                "orpheus",
                partial(speech_models.orpheus, hidden_size=WIDTH),
                partial(speaks, (3, 4, 5, 6), 28),
            ),
            ("voice", save_voice, partial(speaks, (3, 4, 5, 6, 20), 12)),
        )
        for kind, compare in (
            ("float32", in_float32(apart_in_sound, SOUND_LIMIT)),
            ("bfloat16", audible("bfloat16")),
        )
    ),
    _speech(
        "speech, kokoro, float32",
        save_kokoro,
        partial(speaks, (16, 17, 18, 19), 0, voice="af_one"),
        in_float32(apart_in_sound, WAVE_LIMIT),
    ),
    EngineCase(
        name="recognition, whisper, float32",
        write=partial(write_folder, sizes=WHISPER),
        requests=hears,
        compare=equal_transcripts,
    ),
    EngineCase(
        name="recognition, whisper, bfloat16",
        write=partial(write_folder, sizes=WHISPER),
        requests=hears,
        compare=some_transcript,
    ),
    *_codecs(),
)
