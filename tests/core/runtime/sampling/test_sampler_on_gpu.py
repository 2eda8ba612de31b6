"""The sampler by the kernels of a GPU: every token is that of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.bound_rows import bound_row
from support.gpu_rehearsal import rehearse_gpu
from support.kernel_device import is_interpreted
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.sampling import host_copy
from triptych.core.runtime.sampling import sampler as sampler_module
from triptych.core.runtime.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
]
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(temperature=0.9, top_p=0.8, frequency_penalty=0.9),
    SamplingParams(temperature=1.1, top_k=9, logit_bias=((3, 4.0), (7, -100.0))),
    SamplingParams(temperature=1.0, min_p=0.02, min_tokens=3, stop_token_ids=(1, 2)),
]


ALLOWED = [b"", np.packbits(np.arange(64) % 3 == 0, bitorder="little").tobytes()]


def sampled_tokens(device: torch.device) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """Three steps of four rows, some with a grammar; a frame of two codes for two of them."""
    sampler = Sampler(vocab_size=50, max_batch_size=4, device=device)
    for slot, sampling in enumerate(PARAMS):
        sampler.bind(bound_row(slot, sampling, (5, 6)))
    generator = torch.Generator().manual_seed(3)
    ids = []
    for step in range(3):
        logits = (torch.randn(4, 50, generator=generator) * 3).to(device)
        masks = [ALLOWED[(row + step) % 2] for row in range(4)] if step else ()
        sampled = sampler.sample(logits, [2, 0, 3, 1], [2 + step] * 4, masks)
        ids.append(sampled.token_ids_B.tolist())
    frame = sampler.frame_sampler([1, 2], [2, 2], 2)
    logits = torch.randn(2, 2, 50, generator=generator).to(device)
    logits[1, 1, 0] = torch.nan
    codes = frame.sample_all(logits)[:1].tolist()
    return ids, codes, frame.is_finite_B.tolist()


def test_tokens_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sampled_tokens(torch.device("cpu"))
    assert expected[2] == [True, False]
    device = rehearse_gpu(monkeypatch)
    if is_interpreted():  # what pins memory and records events needs the device itself
        monkeypatch.setattr(host_copy.HostCopy, "__init__", lambda copy, tensor: None)
    forbidden: list[object] = []
    monkeypatch.setattr(sampler_module, "keep_allowed", forbidden.append)
    assert sampled_tokens(device) == expected
    masked = [token for row, token in enumerate(expected[0][1]) if (row + 1) % 2]
    assert all(token % 3 == 0 for token in masked)
    assert forbidden == [], "masks are the kernel's"
