from __future__ import annotations

import pytest
import torch

from support.kokoro_models import TINY, render, synthesize, tiny_kokoro
from triptych.core.errors import ContextLengthExceeded, InvalidRequest, NonFinite, WeightsError
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.modalities.tts.configs.kokoro import read_kokoro_config
from triptych.modalities.tts.engine.models.kokoro import model as kokoro_model
from triptych.modalities.tts.engine.models.kokoro.istftnet import HarmonicSource, source_noise
from triptych.modalities.tts.engine.models.kokoro.layers import LengthMask
from triptych.modalities.tts.engine.models.kokoro.model import Kokoro, batches

TOLERANCE = 1e-5
LENGTHS = (3, 12, 7, 8)


@pytest.fixture(scope="module")
def kokoro() -> Kokoro:
    return tiny_kokoro()


def ids(count: int) -> list[int]:
    return [50 + 7 * index % 60 for index in range(count)]


def test_a_sentence_is_whole_frames_of_finite_audio(kokoro: Kokoro) -> None:
    pcm_S = synthesize(kokoro, ids(10), "af_one")
    assert pcm_S.ndim == 1
    assert len(pcm_S) % kokoro.model.config.generator.samples_per_pitch == 0
    assert float(pcm_S.abs().max()) > 0


def test_the_same_seed_is_the_same_samples(kokoro: Kokoro) -> None:
    first, again, other = (synthesize(kokoro, ids(10), "af_one", seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert len(first) == len(other)
    assert not torch.equal(first, other)


def test_rows_of_a_batch_are_independent(kokoro: Kokoro) -> None:
    sentences = [
        kokoro.sentence(ids(count), "af_one", seed=count, speed=1.0 + count / 10)
        for count in LENGTHS
    ]
    alone = [render(kokoro, [sentence])[0] for sentence in sentences]
    together = render(kokoro, sentences)
    assert len({len(pcm_S) for pcm_S in together}) > 2
    for one, among in zip(alone, together, strict=True):
        torch.testing.assert_close(among, one, atol=TOLERANCE, rtol=0)


def test_speed_scales_durations(kokoro: Kokoro) -> None:
    slow, normal, fast = (
        len(synthesize(kokoro, ids(20), "af_one", speed=speed)) for speed in (0.5, 1.0, 2.0)
    )
    assert slow / normal == pytest.approx(2.0, rel=0.15)
    assert fast / normal == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(
    ("phoneme_ids", "speed", "error"),
    [
        ([], 1.0, InvalidRequest),
        ([0], 1.0, InvalidRequest),
        ([178], 1.0, InvalidRequest),
        ([50] * 63, 1.0, ContextLengthExceeded),
        ([50], 0.0, InvalidRequest),
        ([50], float("nan"), InvalidRequest),
        ([50], 4.5, InvalidRequest),
    ],
)
def test_what_cannot_be_spoken_is_refused(
    kokoro: Kokoro, phoneme_ids: list[int], speed: float, error: type[Exception]
) -> None:
    with pytest.raises(error):
        synthesize(kokoro, phoneme_ids, "af_one", speed=speed)


def test_endless_sentences_are_refused(kokoro: Kokoro, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kokoro_model, "MAX_FRAMES", 10)
    with pytest.raises(InvalidRequest, match="at most 10"):
        synthesize(kokoro, ids(20), "af_one")


def test_no_audio_is_an_error() -> None:
    broken = tiny_kokoro()
    broken.model.decoder.generator.conv_post.get_parameter("bias").fill_(torch.inf)
    with pytest.raises(NonFinite):
        synthesize(broken, ids(4), "af_one")


def test_a_shorter_type_for_the_generator_is_close(kokoro: Kokoro) -> None:
    short = tiny_kokoro()
    short.model.decoder.cast_convolutions(torch.bfloat16)
    exact, rounded = (synthesize(k, ids(10), "af_one") for k in (kokoro, short))
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).norm() / exact.norm()) < 0.05


def test_the_cpus_own_kernel_gives_the_same(kokoro: Kokoro, native: NativeKernels) -> None:
    own = tiny_kokoro()
    own.model.decoder.use_native(native)
    by_torch, by_kernel = (synthesize(k, ids(10), "af_one") for k in (kokoro, own))
    assert not torch.equal(by_torch, by_kernel)
    torch.testing.assert_close(by_kernel, by_torch, atol=1e-4, rtol=0)


def test_batches_hold_like_lengths_within_the_budget() -> None:
    lengths = [130, 10, 200, 140, 12, 190]
    got = list(batches(lengths, 400))
    assert sorted(index for batch in got for index in batch) == list(range(6))
    assert got == [[2, 5], [3, 0], [4, 1]]
    assert all(len(batch) == 1 for batch in batches(lengths, 1))


def test_phases_do_not_drift_over_a_long_sentence() -> None:
    """After 50 s at 220 Hz the fundamental is where arithmetic in double says."""
    source = HarmonicSource(300).requires_grad_(False)
    source.l_linear.weight.copy_(torch.eye(9)[:1])
    source.l_linear.bias.zero_()
    signal_S = source(torch.full((4000,), 220.0), torch.zeros(4000 * 300, 9))
    sample_S = torch.arange(len(signal_S), dtype=torch.float64)
    # The phase at the middle of the first pitch value is that of a whole value.
    cycles_S = (sample_S + 0.5 + 150) * 220 / 24_000
    expected_S = torch.tanh(0.1 * torch.sin(2 * torch.pi * (cycles_S % 1)))
    inner = slice(150, -150)
    torch.testing.assert_close(signal_S.double()[inner], expected_S[inner], atol=2e-6, rtol=0)


def test_noise_is_its_seeds_alone() -> None:
    assert torch.equal(source_noise(3, 600), source_noise(3, 600))
    assert not torch.equal(source_noise(3, 600), source_noise(4, 600))


def test_moments_leave_padding_out() -> None:
    rows = [torch.randn(2, length) + 5 for length in (4, 9)]
    padded_BCT = torch.full((2, 2, 9), 1e3)
    for row, x_CT in zip(padded_BCT, rows, strict=True):
        row[:, : x_CT.shape[1]] = x_CT
    mean_BC1, var_BC1 = LengthMask.of([4, 9], torch.device("cpu")).moments(padded_BCT)
    for index, x_CT in enumerate(rows):
        torch.testing.assert_close(mean_BC1[index, :, 0], x_CT.mean(-1))
        torch.testing.assert_close(var_BC1[index, :, 0], x_CT.var(-1, correction=0))


def test_configs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WeightsError, match="n_token"):
        read_kokoro_config({name: value for name, value in TINY.items() if name != "n_token"})
    uneven = {**TINY["istftnet"], "upsample_rates": [10]}
    with pytest.raises(WeightsError, match="kernel size per rate"):
        read_kokoro_config({**TINY, "istftnet": uneven})


def test_phonemes_are_encoded_and_unknown_ones_are_silent(kokoro: Kokoro) -> None:
    assert kokoro.config.encode("ðə kæt 🙂") == (81, 83, 16, 53, 72, 62, 16)
