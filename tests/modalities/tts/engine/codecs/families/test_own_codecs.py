"""The codecs written here: SNAC's keyed noise, HiFi-GAN and Vocos against independent sources."""

from __future__ import annotations

import pytest
import torch
from support.codec_models import hifigan, random_model, randomise, snac, speecht5_hifigan, vocos

from triptych.modalities.tts.engine.codecs import build_decoder
from triptych.modalities.tts.engine.codecs.families.snac import keyed_normal


def test_keyed_noise_is_standard_normal_and_a_function_of_its_key() -> None:
    seeds = torch.arange(4)[:, None]
    noise = keyed_normal(seeds, 2, torch.arange(20_000)[None])
    assert torch.equal(noise[:, 7000:7005], keyed_normal(seeds, 2, torch.arange(7000, 7005)[None]))
    assert noise.mean().abs() < 0.02
    assert (noise.std() - 1).abs() < 0.02
    # Rows, blocks and neighbours in time are independent.
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.03
    assert (noise * keyed_normal(seeds, 3, torch.arange(20_000)[None])).mean().abs() < 0.02
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < 0.02
    assert noise.isfinite().all()


def test_snac_rows_hear_the_noise_of_their_own_seed() -> None:
    model = snac().double().eval()
    randomise(model)
    decoder = build_decoder(model, num_rows=3)
    codes = torch.randint(32, (1, 7, 5)).expand(3, -1, -1)
    decoder.init_state([0, 1, 2], seeds=[5, -9, 5])
    parts = [decoder.push(part, [2, 0, 1]) for part in codes.split(2, -1)]
    parts.append(decoder.flush([2, 0, 1]))
    two, zero, one = (torch.cat([part.row(index) for part in parts]) for index in range(3))
    assert torch.allclose(zero, two, rtol=0, atol=1e-12)
    assert not torch.allclose(zero, one)
    with torch.inference_mode():
        whole = model.decode(codes[:2], torch.tensor([5, -9]))
    assert torch.allclose(torch.stack([zero, one]), whole, rtol=0, atol=1e-10)


def test_snac_orders_codes_coarse_to_fine_and_by_time() -> None:
    model = snac(noise=False).double().eval()
    randomise(model)
    codes = torch.randint(32, (1, 7, 3))
    latents = model.quantizer.embed(codes)
    coarse, middle, fine = model.quantizer.quantizers
    expected = (coarse(codes[:, 0, 1:2]) + middle(codes[:, 2, 1:2]) + fine(codes[:, 3 + 2, 1:2]))[
        ..., 0
    ]
    # Frame 1, third of its four latents: the second middle code and the third fine one.
    assert torch.allclose(latents[..., 4 + 2], expected)


def test_hifigan_equals_transformers_on_the_same_weights() -> None:
    ours, theirs = hifigan().double().eval(), speecht5_hifigan().double().eval()
    randomise(theirs)
    theirs.config.normalize_before = False
    missing, extra = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert (missing, extra) == ([], ["mean", "scale"])
    features = torch.randn(2, 8, 11, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.allclose(ours(features), theirs(features.transpose(1, 2)), rtol=0, atol=1e-12)


def test_vocos_head_is_the_inverse_of_the_short_time_fourier_transform() -> None:
    head = vocos().double().head
    spectrum = torch.randn(1, 17, 9, dtype=torch.complex128)
    log_polar = torch.cat((spectrum.abs().log(), spectrum.angle()), 1)
    head.out = torch.nn.Identity()
    head.out.weight = torch.empty(0, dtype=torch.float64)
    expected = torch.istft(spectrum.clone(), 32, 8, window=head.window, center=True)
    # torch.istft drops the imaginary parts of the first and last bins, as any real inverse does.
    assert torch.allclose(head(log_polar)[:, 0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", ["same", "center"])
def test_vocos_streams_the_windows_edges_exactly(padding: str) -> None:
    """One frame alone: every sample lies under a partial sum of windows."""
    model = vocos(padding=padding, n_fft=24).double().eval()
    randomise(model)
    decoder = build_decoder(model, num_rows=1)
    features = torch.randn(1, 6, 1, dtype=torch.float64)
    decoder.init_state([0])
    streamed = torch.cat([decoder.push(features, [0]).row(0), decoder.flush([0]).row(0)])
    with torch.inference_mode():
        whole = model(features)[0]
    assert len(whole) == (8 if padding == "same" else 0)
    assert torch.allclose(streamed, whole, rtol=0, atol=1e-12)


def test_speecht5_normalises_its_spectrogram() -> None:
    model = random_model("speecht5_hifigan")
    with torch.no_grad():
        model.mean.fill_(3.0)
    build_decoder(model, num_rows=1)
