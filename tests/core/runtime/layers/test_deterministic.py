"""Rows of a deterministic decoder by the kernels of a GPU: alone and in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.gpu_rehearsal import rehearse_gpu
from support.kernel_device import each_type, kernel_device
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers import moe as moe_module
from triptych.core.runtime.layers.attention import Attention, AttentionConfig, KvCache, PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp
from triptych.core.runtime.layers.rotary import RopeConfig

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
PAGE, PAGES_PER_ROW = 16, 5
ATTENTION = AttentionConfig(
    hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, has_qkv_bias=True
)
PLAIN = DecoderConfig(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    norm_eps=1e-5,
    attention=(ATTENTION,),
    rope=RopeConfig(num_rotated_dims=32, max_length=80, trained_length=80),
)
MOE = MoeConfig(num_experts=3, routing=Routing(num_chosen=2), intermediate_size=32)
EXPERTS = replace(PLAIN, moe=MOE)
LATENT = LatentConfig(
    hidden_size=64,
    num_heads=3,
    nope_dim=16,
    rope_dim=32,
    value_dim=24,
    kv_rank=40,
    q_rank=32,
    scale=0.15,
)
LATENTS = replace(PLAIN, attention=(LATENT,))
ROWS = ((1, 3), (1, 30), (65, 70), (5, 9))
"""New tokens and context: those with one are decoding; the batch has more tokens than a tile."""


TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest logit."""


def decoder_of(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(config, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    for linear in decoder.linears():
        linear.is_deterministic = True
    for target in decoder_targets(decoder):
        target.into.copy_(torch.randn(target.into.shape, generator=generator) * 0.2)
    for layer in decoder.layers:
        if isinstance(layer.attention, Attention):
            layer.attention.qkv.bias_O = torch.randn(128, generator=generator).to(device, dtype)
    decoder.prepare()
    return decoder


def logits_of(decoder: Decoder, device: torch.device, rows: Sequence[int]) -> torch.Tensor:
    """Of each row's last token, in a step of these rows alone; a row's pages are its own."""
    num_pages = len(ROWS) * PAGES_PER_ROW
    kv = KvCache(decoder.config.kv_layout(PAGE, decoder.dtype), num_pages, device)
    generator = torch.Generator().manual_seed(1)
    for pages in kv.tensors:
        pages.copy_(torch.randn(pages.shape, generator=generator))
        pages[-1].zero_()
    lengths, contexts = np.array([ROWS[row] for row in rows]).T
    table_BM = torch.tensor([[row + len(ROWS) * n for n in range(PAGES_PER_ROW)] for row in rows])
    starts = np.cumsum(lengths) - lengths
    row_T = np.repeat(np.arange(len(rows)), lengths)
    positions_T = torch.tensor(np.arange(len(row_T)) - (starts - (contexts - lengths))[row_T])
    slots_T = table_BM[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE
    batch = AttentionBatch(
        page_table_BM=table_BM.to(device),
        context_lengths_B=torch.tensor(contexts, device=device),
        query_starts_B=torch.tensor(starts, device=device),
        write_slots_T=slots_T.to(device),
        num_decode_rows=int((lengths == 1).sum()),
        host_query_lengths_B=lengths,
        host_context_lengths_B=contexts,
        is_deterministic=True,
    )
    ids_T = (positions_T * 7 + torch.tensor(np.array(rows)[row_T]) * 3) % 40
    step = PagedStep(kv, batch)
    hidden_TC = decoder.forward(ids_T.to(device), positions_T.to(device), step)
    return decoder.logits(hidden_TC[torch.tensor(starts + lengths - 1)]).cpu()


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("config", [PLAIN, EXPERTS, LATENTS], ids=["plain", "experts", "latents"])
@pytest.mark.parametrize("dtype", each_type())
@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_its_batch(
    config: DecoderConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_RV = logits_of(decoder_of(config, CPU, dtype), CPU, range(len(ROWS)))
    monkeypatch.setattr(moe_module, "has_grouped_products", lambda device: True)
    device = rehearse_gpu(monkeypatch)
    decoder = decoder_of(config, device, dtype)
    together_RV = logits_of(decoder, device, range(len(ROWS)))
    tolerance = TOLERANCES[dtype] * float(expected_RV.abs().max())
    torch.testing.assert_close(together_RV, expected_RV, rtol=0, atol=tolerance)
    for rows in ([0], [1, 3], [2]):
        assert torch.equal(logits_of(decoder, device, rows), together_RV[rows])


@torch.inference_mode()
def test_experts_together_are_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = []
    for is_grouped, at in ((False, CPU), (True, kernel_device())):
        monkeypatch.setattr(moe_module, "has_grouped_products", lambda device, g=is_grouped: g)
        layers.append(MoeMlp(MOE, 64, "silu", dtype=torch.float32, device=at))
    one_by_one, together = layers
    generator = torch.Generator().manual_seed(2)
    for ours, theirs in zip(one_by_one.linears(), together.linears(), strict=True):
        ours.weight_OI.copy_(torch.randn(ours.weight_OI.shape, generator=generator) * 0.2)
        theirs.weight_OI.copy_(ours.weight_OI)
    x_TC = torch.randn(9, 64, generator=generator)
    expected_TC = one_by_one(x_TC, x_TC)
    device = rehearse_gpu(monkeypatch)
    x_TC = x_TC.to(device)
    torch.testing.assert_close(together(x_TC, x_TC).cpu(), expected_TC, rtol=1e-4, atol=1e-4)
