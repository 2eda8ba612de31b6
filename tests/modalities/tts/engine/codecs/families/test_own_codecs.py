"""SNAC, which is written here: the order of its codes, and its keyed noise."""

from __future__ import annotations

import torch

from support.codec_models import randomize, snac
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


def test_snac_rows_get_the_noise_of_their_own_seed() -> None:
    model = snac().double().eval()
    randomize(model)
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
    randomize(model)
    codes = torch.randint(32, (1, 7, 3))
    latents = model.quantizer.embed(codes)
    coarse, middle, fine = model.quantizer.quantizers
    expected = (coarse(codes[:, 0, 1:2]) + middle(codes[:, 2, 1:2]) + fine(codes[:, 3 + 2, 1:2]))[
        ..., 0
    ]
    # Frame 1, third of its four latents: the second middle code and the third fine one.
    assert torch.allclose(latents[..., 4 + 2], expected)
