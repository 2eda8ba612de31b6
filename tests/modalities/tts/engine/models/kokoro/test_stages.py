"""Kokoro stage by stage, behind the runner, the scheduler and the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.kokoro_models import TINY, synthesize, tiny_kokoro, tiny_model, tiny_voices
from triptych.core.engine_api.plan import StepResult
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.staged_plan import StagedPlan, StagedRow, UnitStart
from triptych.core.errors import ConfigError, InvalidRequest, OutOfMemory, UnsupportedOption
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions, SpeechOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.engine.models.kokoro.convert import write_folder
from triptych.modalities.tts.engine.models.kokoro.layers import finish
from triptych.modalities.tts.engine.models.kokoro.loader import KokoroLoader
from triptych.modalities.tts.engine.models.kokoro.model import Kokoro
from triptych.modalities.tts.engine.models.kokoro.stages import StagedKokoro, kept_sound
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest, SpeechSegment, VoiceClip
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

CPU = torch.device("cpu")
IDS = tuple(50 + 7 * index % 60 for index in range(20))


def trimmed(pcm_S: Any) -> Any:
    return pcm_S[kept_sound(pcm_S)]


@pytest.fixture(scope="module")
def kokoro() -> Kokoro:
    return tiny_kokoro()


def request(*lengths: int, pause_s: float = 0.0, speed: float = 1.0, voice: str = "af_one"):  # type: ignore[no-untyped-def]
    return SpeechRequest(
        segments=tuple(
            SpeechSegment(prompt_ids=IDS[:length], pause_s=pause_s) for length in lengths
        ),
        sampling=SamplingParams(seed=7),
        voice=voice,
        speed=speed,
    )


def step(runner: StagedRunner, number: int, *rows: tuple[str, int], **parts: object):  # type: ignore[type-arg, no-untyped-def]
    plan = StagedPlan(
        step_id=number,
        model="k",
        kind="slice",
        rows=tuple(StagedRow(job_id=job_id, unit=unit) for job_id, unit in rows),
        **parts,  # type: ignore[arg-type]
    )
    return runner.launch(plan).result()


def drive(runner: StagedRunner, asked: SpeechRequest, unit: int = 0) -> tuple[SpeechDelta, int]:  # type: ignore[type-arg]
    """One unit to its end, and in how many stages."""
    starts = (UnitStart(job_id="a", unit=unit, request=asked),)
    for number in range(1000):
        (row,) = step(runner, number, ("a", unit), starts=starts if number == 0 else ()).rows
        assert row.error is None
        if row.next_stage is None:
            return row.payload, number + 1
        assert row.payload is None
    raise AssertionError("a unit ends")


def samples(delta: SpeechDelta) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(delta.pcm, np.float32)


@pytest.mark.parametrize("slice_gmacs", [0.0, 1e-4, 1e-3, 1e9])
def test_stages_give_the_samples_of_one_go(kokoro: Kokoro, slice_gmacs: float) -> None:
    runner = StagedRunner(StagedKokoro(kokoro, slice_gmacs=slice_gmacs), CPU)
    asked = request(20, speed=1.3, voice="af_one*0.7+bm_two*0.3")
    delta, num_stages = drive(runner, asked)
    whole = synthesize(kokoro, IDS, asked.voice, speed=1.3, seed=7)
    assert np.array_equal(samples(delta), trimmed(whole.numpy()))
    sentence = kokoro.sentence(IDS, asked.voice, speed=1.3, seed=7)
    frames = np.cumsum(finish(kokoro.model.plan(sentence)).durations)[1:-1]
    start_s = kept_sound(whole.numpy()).start / kokoro.sample_rate
    frame_s = kokoro.config.generator.samples_per_frame / kokoro.sample_rate
    assert delta.id_ends_s == pytest.approx((frames * frame_s - start_s).tolist())
    assert num_stages == 1 if slice_gmacs == 1e9 else num_stages > 3
    assert runner.num_works == 0


def test_more_is_cut_where_less_may_be_done_at_a_time(kokoro: Kokoro) -> None:
    counts = [
        drive(StagedRunner(StagedKokoro(kokoro, slice_gmacs=gmacs), CPU), request(20))[1]
        for gmacs in (0.0, 1e-4, 1e-3)
    ]
    assert counts[0] > counts[1] > counts[2] > 1


def test_sentences_are_separated_and_end_with_their_pauses(kokoro: Kokoro) -> None:
    asked = request(10, 12, pause_s=0.5)
    runner = StagedRunner(StagedKokoro(kokoro), CPU)
    first, second = (drive(runner, asked, unit)[0] for unit in (0, 1))
    assert (first.segment, first.segment_finish, first.finish_reason) == (0, "stop", None)
    assert (second.segment, second.segment_finish, second.finish_reason) == (1, "stop", "stop")
    assert not samples(first)[-12_000:].any()
    spoken = synthesize(kokoro, IDS[:12], "af_one", seed=8).numpy()
    assert np.array_equal(samples(second)[:-12_000], trimmed(spoken))
    assert second.num_output_tokens * 600 == len(spoken)


def test_speed_shortens_pauses(kokoro: Kokoro) -> None:
    runner = StagedRunner(StagedKokoro(kokoro), CPU)
    slow, fast = (drive(runner, request(10, pause_s=0.5, speed=speed))[0] for speed in (0.5, 2.0))
    assert not samples(slow)[-24_000:].any()
    assert not samples(fast)[-6_000:].any()
    assert samples(fast)[-6_100:].any()


def test_silence_at_the_edges_goes_and_nothing_else() -> None:
    speech_S = np.sin(np.arange(4800, dtype=np.float32) / 7)
    quiet_S = 1e-4 * np.ones(7200, np.float32)
    kept_S = trimmed(np.concatenate((quiet_S, speech_S, quiet_S)))
    assert len(kept_S) == 480 + 4800 + 1440
    assert np.array_equal(kept_S[480:5280], speech_S)
    inner_S = np.concatenate((speech_S, quiet_S, speech_S))
    assert np.array_equal(trimmed(inner_S), inner_S)
    for silent in (np.zeros(4800, np.float32), np.zeros(0, np.float32), speech_S[:100]):
        assert np.array_equal(trimmed(silent), silent)


def test_a_batch_on_a_gpu_gives_each_its_own(kokoro: Kokoro) -> None:
    """A plan in two steps, then the sound of all at once: the path of a GPU, run on the CPU.

    The first ends where the host must know how long the sentence will be.
    """
    model = StagedKokoro(kokoro)
    model._is_sliced = False
    runner = StagedRunner(model, CPU)
    asked = request(10, 14, 6)
    units = [("a", unit) for unit in range(3)]
    starts = tuple(UnitStart(job_id="a", unit=unit, request=asked) for unit in range(3))
    counted = step(runner, 0, *units, starts=starts)
    assert {row.next_stage.name for row in counted.rows} == {"curves"}
    planned = step(runner, 1, *units)
    assert {row.next_stage.name for row in planned.rows} == {"render"}
    for row, length, seed in zip(step(runner, 2, *units).rows, (10, 14, 6), (7, 8, 9), strict=True):
        alone = trimmed(synthesize(kokoro, IDS[:length], "af_one", seed=seed).numpy())
        np.testing.assert_allclose(samples(row.payload), alone, atol=1e-5)
        assert row.next_stage is None
    assert runner.num_works == 0


def test_what_is_dropped_is_let_go_of(kokoro: Kokoro) -> None:
    runner = StagedRunner(StagedKokoro(kokoro, slice_gmacs=0.0), CPU)
    starts = (UnitStart(job_id="a", unit=0, request=request(10)),)
    step(runner, 0, ("a", 0), starts=starts)
    assert runner.num_works == 1
    assert step(runner, 1, dropped=("a",)).rows == ()
    assert runner.num_works == 0


def test_a_sentence_that_cannot_be_spoken_spoils_no_other(kokoro: Kokoro) -> None:
    runner = StagedRunner(StagedKokoro(kokoro), CPU)
    starts = (
        UnitStart(job_id="bad", unit=0, request=request(10, voice="nobody")),
        UnitStart(job_id="good", unit=0, request=request(10)),
    )
    result = step(runner, 0, ("bad", 0), ("good", 0), starts=starts)
    assert isinstance(result, StepResult)
    assert isinstance(result.rows[0].error, InvalidRequest)
    assert result.rows[1].error is None


def test_no_audio_is_an_error_of_that_job_alone() -> None:
    broken = tiny_kokoro()
    broken.model.decoder.generator.conv_post.get_parameter("bias").fill_(torch.inf)
    runner = StagedRunner(StagedKokoro(broken), CPU)
    starts = (UnitStart(job_id="a", unit=0, request=request(4)),)
    row = step(runner, 0, ("a", 0), starts=starts).rows[0]
    while row.next_stage is not None:
        (row,) = step(runner, 1, ("a", 0)).rows
    assert row.error is not None
    assert row.error.code == "non_finite"
    assert runner.num_works == 0


def test_want_of_memory_leaves_nothing_half_begun(
    kokoro: Kokoro, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StagedKokoro(kokoro)
    runner = StagedRunner(model, CPU)
    starts = (UnitStart(job_id="a", unit=0, request=request(10)),)

    def full(_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model, "advance", full)
        with pytest.raises(OutOfMemory):
            step(runner, 0, ("a", 0), starts=starts)
    assert runner.num_works == 0
    assert step(runner, 1, ("a", 0), starts=starts).rows[0].error is None


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedModel:
    voices = {f"voices.{name}": table for name, table in tiny_voices().items()}
    write_folder(tmp_path, {**tiny_model().state_dict(), **voices}, TINY)
    return ResolvedModel(name="tiny", reference="tiny", folder=str(tmp_path), digest="0")


def loader(resolved: ResolvedModel, config: Config, ledger: Ledger) -> KokoroLoader:
    return KokoroLoader(resolved, config, Device(CPU), ledger)


async def test_concurrent_requests_and_a_cancelled_one(
    resolved: ResolvedModel, kokoro: Kokoro
) -> None:
    config = Config(models=ModelOptions(dtype="float32"))
    ledger = Ledger(1 << 30)
    client = LocalClient(
        EngineCore([loader(resolved, config, ledger)], config=config, ledger=ledger)
    )
    try:
        streams = [client.submit("tiny", request(n, 20), job_id=f"j{n}") for n in (8, 12)]
        left = client.submit("tiny", request(20, 20), job_id="left")
        await left.aclose()
        for stream, length in zip(streams, (8, 12), strict=True):
            deltas = [output.payload async for output in stream]
            assert [delta.segment for delta in deltas] == [0, 1]
            assert [delta.num_prompt_tokens for delta in deltas] == [length, length + 20]
            assert deltas[-1].finish_reason == "stop"
            assert deltas[-1].num_output_tokens > deltas[0].num_output_tokens
            alone = trimmed(synthesize(kokoro, IDS[:length], "af_one", seed=7).numpy())
            # The served model sums in another order, since its linear layers are packed.
            np.testing.assert_allclose(samples(deltas[0]), alone, atol=5e-4)
        clip = VoiceClip(digest="0", pcm=b"", sample_rate=24_000)
        with pytest.raises(UnsupportedOption, match="mix its voices"):
            await anext(client.submit("tiny", _with_clip(clip), job_id="clip"))
        with pytest.raises(InvalidRequest, match="nobody"):
            await anext(client.submit("tiny", request(8, voice="nobody"), job_id="nobody"))
        with pytest.raises(InvalidRequest, match="nothing to say"):
            await anext(client.submit("tiny", request(), job_id="empty"))
    finally:
        await client.close()
    assert ledger.available_bytes == ledger.capacity_bytes


def _with_clip(clip: VoiceClip) -> SpeechRequest:
    return SpeechRequest(
        segments=(SpeechSegment(prompt_ids=IDS),), sampling=SamplingParams(), clip=clip
    )


def test_options_of_codecs_are_refused_by_name(resolved: ResolvedModel) -> None:
    config = Config(speech=SpeechOptions(chunk_size=(4,)))
    with pytest.raises(ConfigError, match="--chunk-size"):
        loader(resolved, config, Ledger(1 << 30))


def test_memory_is_reserved_before_it_is_taken(resolved: ResolvedModel) -> None:
    ledger = Ledger(1 << 30)
    progress: list[float] = []
    loaded = loader(resolved, Config(), ledger).load(progress.append)
    held = ledger.by_owner()
    num_bytes = sum(weight.numel() * 4 for weight in tiny_model().parameters())
    assert held["tiny/weights"] <= num_bytes
    assert held["tiny/activations"] > 0
    assert progress[-1] == pytest.approx(1.0)
    loaded.close()
    assert ledger.available_bytes == ledger.capacity_bytes
