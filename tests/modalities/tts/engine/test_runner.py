"""Audio steps and the reading of clips: what is pushed, what is left out, and who fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.codec_models import random_model
from triptych.core.engine_api.plan import StepResult
from triptych.core.errors import InvalidRequest, OutOfMemory
from triptych.core.process.content_cache import ContentCache
from triptych.modalities.tts.engine.codecs.loading import adapter_for, build_decoder
from triptych.modalities.tts.engine.codecs.protocol import DecodedAudio, SpeechCodec
from triptych.modalities.tts.engine.codecs.window import (
    OneShotCodec,
    PromptUse,
    WindowDecoder,
    WindowPolicy,
)
from triptych.modalities.tts.engine.models.blueprint import Codes, SpeechTraits
from triptych.modalities.tts.engine.runner import AudioSteps, SpeechRunner, VoiceReader
from triptych.modalities.tts.plan import (
    AudioPlan,
    AudioRow,
    VoicePlan,
    VoicePrompt,
)
from triptych.modalities.tts.wire import VoiceClip

CPU = torch.device("cpu")


def identity(steps_NK: Codes) -> Codes:
    return np.ascontiguousarray(steps_NK.T)


def runner(codec: SpeechCodec, traits: SpeechTraits | None = None, frames: Any = identity) -> Any:
    audio = AudioSteps(codec, traits or SpeechTraits(), frames, CPU)
    voices = VoiceReader(codec, read_prompt, ContentCache(1000, copy=np.copy), CPU)
    return SpeechRunner(Refuses(), audio, voices, CPU)  # type: ignore[arg-type]


class Refuses:
    """A token runner that must not be called."""


def read_prompt(clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
    return VoicePrompt(prompt_ids=clip.prompt_ids, codes=tuple(map(tuple, codes_QF.T.tolist())))


def step(speaker: SpeechRunner, *rows: AudioRow) -> StepResult:
    plan = AudioPlan(step_id=7, model="m", kind="audio", rows=rows)
    result = speaker.launch(plan).result()
    assert isinstance(result, StepResult)
    return result


def pcm(result: StepResult, row: int = 0) -> np.ndarray:
    return np.frombuffer(result.rows[row].pcm, "<f4")


def codes_of(adapter: Any, num_frames: int, seed: int) -> list[tuple[int, ...]]:
    codes_QF = adapter.probe_codes(1, num_frames, seed=seed)[0]
    return [tuple(codes) for codes in codes_QF.T.tolist()]


def one_shot(adapter: Any, codes: Sequence[tuple[int, ...]]) -> np.ndarray:
    with torch.inference_mode():
        return adapter.one_shot(torch.tensor(codes).T[None])[0].numpy()


@pytest.fixture(scope="module", params=["mimi", "snac", "dac"])
def codec(request: pytest.FixtureRequest) -> tuple[Any, SpeechCodec]:
    """Without a delay, with noise, and reading ahead."""
    model = random_model(request.param, torch.float32)
    decoder = build_decoder(model, num_rows=4)
    return adapter_for(model), SpeechCodec(decoder=decoder, codebook_size=32)


def test_rows_of_every_length_share_a_step(codec: tuple[Any, SpeechCodec]) -> None:
    adapter, speech = codec
    speaker = runner(speech)
    long, short = codes_of(adapter, 11, 1), codes_of(adapter, 3, 2)
    results = [
        step(
            speaker,
            AudioRow(job_id="a", slot=2, codes=tuple(long[:1]), is_first=True),
            AudioRow(job_id="b", slot=0, codes=tuple(short), is_first=True, is_last=True),
        ),
        step(speaker, AudioRow(job_id="a", slot=2, codes=tuple(long[1:8]))),
        step(
            speaker,
            AudioRow(job_id="b", slot=0, codes=tuple(long[:2]), is_first=True),
            AudioRow(job_id="a", slot=2, codes=tuple(long[8:]), is_last=True),
        ),
        step(speaker, AudioRow(job_id="b", slot=0, is_last=True)),
    ]
    spoken = np.concatenate([pcm(results[0]), pcm(results[1]), pcm(results[2], 1)])
    np.testing.assert_allclose(spoken, one_shot(adapter, long), atol=1e-5)
    np.testing.assert_allclose(pcm(results[0], 1), one_shot(adapter, short), atol=1e-5)
    again = np.concatenate([pcm(results[2]), pcm(results[3])])
    np.testing.assert_allclose(again, one_shot(adapter, long[:2]), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_voice_prompt_is_not_part_of_the_output(codec: tuple[Any, SpeechCodec], chunk: int) -> None:
    adapter, speech = codec
    speaker = runner(speech)
    prompt, codes = codes_of(adapter, 5, 3), codes_of(adapter, 9, 4)
    first = AudioRow(job_id="a", slot=1, is_first=True, prompt=tuple(prompt))
    parts = [pcm(step(speaker, first))]
    for at in range(0, len(codes), chunk):
        row = AudioRow(job_id="a", slot=1, codes=tuple(codes[at : at + chunk]))
        parts.append(pcm(step(speaker, row)))
    parts.append(pcm(step(speaker, AudioRow(job_id="a", slot=1, is_last=True))))
    expected = one_shot(adapter, prompt + codes)[len(prompt) * speech.decoder.hop :]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-5)


def test_steps_wait_until_their_frame_is_whole() -> None:
    """Two steps to a frame, the first of them a step late."""
    spoken: list[list[int]] = []

    def decode(codes_BQF: torch.Tensor) -> torch.Tensor:
        spoken.append(codes_BQF[0, 0].tolist())
        return codes_BQF[:, 0].float()

    window = WindowDecoder(
        OneShotCodec(decode=decode, num_codebooks=1, sample_rate=8, hop=1),
        WindowPolicy(),
        num_rows=1,
    )
    traits = SpeechTraits(steps_per_frame=2, delay_steps=1)
    speaker = runner(
        SpeechCodec(decoder=window, codebook_size=1000),
        traits,
        lambda steps_NK: steps_NK[1::2].T[:, : traits.num_frames(len(steps_NK))],
    )
    rows = [
        AudioRow(job_id="a", slot=0, codes=((0,), (1,)), is_first=True),
        AudioRow(job_id="a", slot=0, codes=((2,),)),
        AudioRow(job_id="a", slot=0, codes=((3,), (4,), (5,)), is_last=True),
    ]
    assert [pcm(step(speaker, row)).tolist() for row in rows] == [[], [1.0], [3.0]]
    assert spoken == [[1], [3]]


def test_windowed_decoder_gets_the_voice_prompt() -> None:
    windows: list[list[int]] = []

    def decode(codes_BQF: torch.Tensor) -> torch.Tensor:
        windows.append(codes_BQF[0, 0].tolist())
        return codes_BQF[:, 0].float()

    window = WindowDecoder(
        OneShotCodec(decode=decode, num_codebooks=1, sample_rate=8, hop=1),
        WindowPolicy(prompt_use=PromptUse.ONCE),
        num_rows=1,
    )
    speaker = runner(SpeechCodec(decoder=window, codebook_size=1000))
    row = AudioRow(job_id="a", slot=0, codes=((3,),), is_first=True, prompt=((1,), (2,)))
    assert pcm(step(speaker, row)).tolist() == [3.0]
    assert windows == [[1, 2, 3]]


class Poisoned:
    """One sample a frame, NaN for code 13; memory runs out at code 99."""

    sample_rate, hop, latency, num_rows = 8, 1, 0, 4

    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        pass

    def push(
        self, codes_BQF: torch.Tensor, rows: Sequence[int], num_valid: Sequence[int]
    ) -> DecodedAudio:
        if (codes_BQF == 99).any():
            raise torch.OutOfMemoryError("no room")
        pcm_BS = codes_BQF[:, 0].float()
        pcm_BS[codes_BQF[:, 0] == 13] = torch.nan
        return DecodedAudio(pcm_BS, (0,) * len(rows), tuple(num_valid))

    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        none = (0,) * len(rows)
        return DecodedAudio(torch.zeros(len(rows), 0), none, none)


@pytest.mark.parametrize("bad", [13, 50, -1])
def test_a_row_without_sound_fails_alone(bad: int) -> None:
    speaker = runner(SpeechCodec(decoder=Poisoned(), codebook_size=50))  # type: ignore[arg-type]
    result = step(
        speaker,
        AudioRow(job_id="a", slot=0, codes=((1,), (2,)), is_first=True),
        AudioRow(job_id="b", slot=1, codes=((4,), (bad,)), is_first=True, is_last=True),
        AudioRow(job_id="c", slot=3, codes=((3,),), is_first=True),
    )
    assert [row.is_finite for row in result.rows] == [True, False, True]
    assert result.rows[1].pcm == b""
    assert pcm(result).tolist() == [1.0, 2.0]
    assert pcm(result, 2).tolist() == [3.0]


def test_running_out_of_memory_is_an_error_of_the_step() -> None:
    speaker = runner(SpeechCodec(decoder=Poisoned(), codebook_size=1000))  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory):
        step(speaker, AudioRow(job_id="a", slot=0, codes=((99,),), is_first=True))


def clip(rate: int = 8, num_samples: int = 40, digest: str = "d") -> VoiceClip:
    samples = np.arange(num_samples, dtype="<f4")
    return VoiceClip(digest=digest, pcm=samples.tobytes(), sample_rate=rate, prompt_ids=(4, 5))


def read(speaker: SpeechRunner, wanted: VoiceClip) -> VoicePrompt:
    plan = VoicePlan(step_id=3, model="m", kind="voice", clip=wanted)
    result = speaker.launch(plan).result()
    (prompt,) = result.rows
    return prompt


def test_a_clip_is_encoded_once_at_the_codecs_rate() -> None:
    lengths: list[int] = []

    def encode(pcm_S: torch.Tensor) -> torch.Tensor:
        lengths.append(len(pcm_S))
        return torch.tensor([[1, 2], [3, 4]])

    speaker = runner(SpeechCodec(decoder=Poisoned(), codebook_size=1000, encode=encode))  # type: ignore[arg-type]
    expected = VoicePrompt(prompt_ids=(4, 5), codes=((1, 3), (2, 4)))
    assert [read(speaker, clip()) for _ in range(2)] == [expected] * 2
    assert lengths == [40]
    read(speaker, clip(rate=16, digest="e"))
    assert lengths == [40, 20]


def test_a_step_that_fails_after_its_launch_keeps_no_voice_in_use() -> None:
    cache: ContentCache[Codes] = ContentCache(1000, copy=np.copy)
    codec = SpeechCodec(
        decoder=Poisoned(),  # type: ignore[arg-type]
        codebook_size=1000,
        encode=lambda _: torch.tensor([[1, 2]]),
    )
    reader = VoiceReader(codec, read_prompt, cache, CPU)
    plan = VoicePlan(step_id=3, model="m", kind="voice", clip=clip())
    reader.launch(plan).result()
    assert cache.num_bytes
    reader.launch(plan)  # the result is not read
    reader.close()
    assert not cache.num_bytes


def test_model_without_encoder_refuses_cloning() -> None:
    speaker = runner(SpeechCodec(decoder=Poisoned(), codebook_size=1000))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="cannot imitate recordings"):
        read(speaker, clip())
