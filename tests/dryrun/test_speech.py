"""Steps of speech models: tokens of each head, sound by each codec, sentences in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from support import speech_models
from support.codec_models import MODELS as CODECS
from support.codec_models import random_model
from support.dry_run import WatchedRunner, dry_run
from support.fake_cuda import CUDA, FakeCuda
from support.kokoro_models import tiny_kokoro
from support.voice_model import save_voice
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.staged_plan import StagedPlan, StagedRow, UnitStart
from triptych.core.options.config import Config
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.modalities.tts.engine.codecs.decoder import StreamingDecoder
from triptych.modalities.tts.engine.codecs.loading import adapter_for
from triptych.modalities.tts.engine.codecs.window import (
    OneShotCodec,
    PromptUse,
    WindowDecoder,
    WindowPolicy,
)
from triptych.modalities.tts.engine.loader import open_speech_loader
from triptych.modalities.tts.engine.models.kokoro.stages import StagedKokoro
from triptych.modalities.tts.wire import SpeechRequest, SpeechSegment

LIVELY = SamplingParams(temperature=0.7, top_k=8, seed=1, max_tokens=24)


@dataclass(frozen=True)
class Head:
    """How a tiny model is saved, an id or code that it may sample, and steps that make a sound."""

    save: Callable[[Path], object]
    code: int
    num_steps: int
    prompt: tuple[int, ...] = (3, 4, 5, 6)


HEADS = {
    "csm": Head(speech_models.csm, 5, 3),
    "higgs": Head(speech_models.higgs, 5, 11),
    "orpheus": Head(speech_models.orpheus, 50, 14),
    "voice": Head(save_voice, 2, 5, (3, 4, 5, 6, 20)),
}


@pytest.fixture(autouse=True)
def _codecs_are_proven_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of a codec compares values, of which there are none here."""
    monkeypatch.setattr(StreamingDecoder, "_verify", lambda decoder: None)


@pytest.mark.parametrize("name", HEADS)
def test_each_head_and_its_codec(gpu: FakeCuda, tmp_path: Path, config: Config, name: str) -> None:
    head = HEADS[name]
    head.save(tmp_path)
    gpu.deliver = lambda host: sample(host, head.code)
    run = dry_run(gpu, open_speech_loader, tmp_path, config)
    segment = SpeechSegment(prompt_ids=head.prompt, max_steps=head.num_steps)
    for job_id in "ab":
        run.submit(job_id, SpeechRequest(segments=(segment,), sampling=LIVELY))
    run.end_well()
    assert run.runner.peaks.keys() >= {"prefill", "decode", "audio"}
    assert gpu.faults == []


def sample(host: torch.Tensor, code: int) -> None:
    """Rows of frames that do not end and are sound, or ids, as they come from a step."""
    if host.dtype is torch.int64:
        host.fill_(code)
        if host.dim() == 2:
            host[:, 0], host[:, 1] = 0, 1


def codes(num_rows: int, num_codebooks: int, num_frames: int) -> torch.Tensor:
    return torch.zeros(num_rows, num_codebooks, num_frames, dtype=torch.int64, device=CUDA)


@pytest.mark.parametrize("name", CODECS)
def test_each_codec_as_a_stream(gpu: FakeCuda, name: str) -> None:
    """Rows that join, lag and end at different times."""
    adapter = adapter_for(random_model(name, torch.float32).to(CUDA))
    decoder, width = StreamingDecoder(adapter, num_rows=4, verify=False), adapter.num_codebooks
    with gpu.launch():
        decoder.init_state([0, 1])
        decoder.push(codes(2, width, 3), [0, 1])
        decoder.init_state([3], seeds=[7])
        decoder.push(codes(3, width, 4), [0, 1, 3], [4, 2, 1])
        decoder.push(codes(2, width, 1), [3, 0])
        decoder.flush([1, 3])
        sound = decoder.push(codes(1, width, 2), [0])
    assert sound.pcm_BS.device == CUDA
    assert gpu.faults == []
    assert gpu.kernels == {"stream_conv"}
    assert decoder.state_bytes > 0


@pytest.mark.parametrize("prompt_use", PromptUse)
def test_a_codec_in_windows(gpu: FakeCuda, prompt_use: PromptUse) -> None:
    codec = OneShotCodec(
        decode=lambda codes_BQF: codes_BQF.float().mean(1).repeat_interleave(6, 1),
        num_codebooks=3,
        sample_rate=600,
        hop=6,
    )
    decoder = WindowDecoder(codec, WindowPolicy(buffer=2, prompt_use=prompt_use), num_rows=4)
    with gpu.launch():
        decoder.init_state([0, 2])
        decoder.prime(0, codes(1, 3, 4)[0])
        for _ in range(3):
            sound = decoder.push(codes(2, 3, 2), [0, 2], [2, 1])
        decoder.flush([0, 2])
    assert sound.pcm_BS.device == CUDA
    assert gpu.faults == []


def test_sentences_in_stages(gpu: FakeCuda) -> None:
    kokoro = tiny_kokoro()
    kokoro = replace(kokoro, model=kokoro.model.to(CUDA))
    gpu.deliver = lambda host: host.dtype is torch.int64 and host.fill_(40)
    runner = WatchedRunner(gpu, StagedRunner(StagedKokoro(kokoro), CUDA))
    segment = SpeechSegment(prompt_ids=(16, 17, 18, 19), pause_s=0.1)
    asked = SpeechRequest(segments=(segment,) * 3, sampling=SamplingParams(seed=1), voice="af_one")
    rows = tuple(StagedRow(job_id="a", unit=unit) for unit in range(3))
    starts = tuple(UnitStart(job_id="a", unit=unit, request=asked) for unit in range(3))
    names = []
    for step_id, began in enumerate((starts, (), ())):
        plan = StagedPlan(step_id=step_id, model="m", kind="s", rows=rows, starts=began)
        found = runner.launch(plan).result().rows
        assert all(row.error is None for row in found)
        names.append(found[0].next_stage and found[0].next_stage.name)
    assert names == ["curves", "render", None]
    assert all(row.payload.pcm for row in found)
    assert gpu.faults == []
