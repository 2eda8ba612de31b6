"""Penalties against those of the sampler."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.kernels.triton import penalties as kernel
from triptych.core.runtime.sampling.processors import _IS_IN_PROMPT, Penalties

pytestmark = pytest.mark.gpu
launch = on_device(kernel.launch)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1024, 1300])
def test_equals_the_sampler_s(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    penalties = Penalties(vocab_size, 4, CPU, Uploads(CPU))
    for slot, scales in enumerate([(1.3, 0.0, 0.0), (1.0, 0.7, -0.5), (0.8, -0.4, 1.1)]):
        history = torch.randint(vocab_size, (60,), generator=generator).tolist()
        penalties.bind(slot, scales, history[:20], history[20:])
    slots = torch.tensor([2, 0, 1])
    penalties.count(slots, torch.tensor([1, 0, 4]))
    assert penalties._counts_SV is not None
    logits = (torch.randn(3, vocab_size, generator=generator) * 4).to(dtype)
    found = launch(logits, penalties._counts_SV, penalties._scales_S3, slots, _IS_IN_PROMPT - 1)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, penalties.apply(logits.float(), slots), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, logits.float())
