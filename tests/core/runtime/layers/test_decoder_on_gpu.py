"""A decoder's step by the kernels of a GPU against the same step in torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.gpu_rehearsal import rehearse_gpu
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.kernels.triton import (
    add_rms_norm,
    key_index,
    latent_write,
    rope_write,
)
from triptych.core.runtime.layers.altup import AltUpConfig
from triptych.core.runtime.layers.attention import (
    AttentionConfig,
    HeadNormConfig,
    KvCache,
    PagedStep,
)
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, LateInputs
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.layer_inputs import LayerInputConfig
from triptych.core.runtime.layers.rotary import QueryScaling, RopeConfig

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
PAGE, NUM_PAGES = 4, 6
ATTENTION = AttentionConfig(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16)
ROPE = RopeConfig(num_rotated_dims=16, max_length=64, trained_length=64)
LLAMA = DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    norm_eps=1e-5,
    attention=(ATTENTION, ATTENTION),
    rope=ROPE,
)
NORMED = replace(ATTENTION, head_norm=HeadNormConfig(eps=1e-6), has_qkv_bias=True)
LOCAL = replace(
    ATTENTION, head_norm=HeadNormConfig(eps=1e-6, is_centred=True), window=3, uses_local_rope=True
)
LATENT = LatentConfig(
    hidden_size=32,
    num_heads=4,
    nope_dim=8,
    rope_dim=16,
    value_dim=12,
    kv_rank=20,
    q_rank=24,
    scale=0.2,
)
INDEX = KeyIndexConfig(num_heads=3, head_dim=20, num_chosen=3)
CONFIGS = {
    "chosen latents": replace(
        LLAMA, attention=(replace(LATENT, index=INDEX), replace(LATENT, is_interleaved=False))
    ),
    "latents": replace(LLAMA, attention=(LATENT, replace(LATENT, is_interleaved=False))),
    "llama": LLAMA,
    "half of the head turned": replace(LLAMA, rope=replace(ROPE, num_rotated_dims=8)),
    "head norms, a layer without rotation": replace(
        LLAMA, attention=(NORMED, replace(NORMED, uses_rope=False))
    ),
    "gemma": replace(
        LLAMA,
        attention=(LOCAL, replace(LOCAL, window=None, uses_local_rope=False)),
        local_rope=replace(ROPE, theta=100.0),
        activation="gelu_tanh",
        has_centred_norms=True,
        has_post_norms=True,
    ),
}
OWN = replace(ATTENTION, head_norm=HeadNormConfig(eps=1e-6), value_norm_eps=1e-6, scale=0.3)
JOINT = replace(ATTENTION, head_norm=HeadNormConfig(eps=1e-6, is_joint=True))
LAYER_NORMED = HeadNormConfig(eps=1e-6, kind="layer", has_own_weights=True)
WITHOUT_KERNELS = {
    "gemma 4": replace(
        LLAMA,
        attention=(
            replace(OWN, window=3, uses_local_rope=True),
            replace(OWN, head_dim=32, num_kv_heads=1, soft_cap=5.0),
            replace(OWN, window=3, uses_local_rope=True, reads_layer=0),
        ),
        local_rope=ROPE,
        rope=replace(ROPE, num_rotated_dims=32),
        activation="gelu_tanh",
        has_post_norms=True,
        has_layer_scales=True,
        layer_inputs=LayerInputConfig(
            hidden_size=32, size=8, num_layers=3, vocab_size=30, norm_eps=1e-6
        ),
        logit_cap=5.0,
    ),
    "gemma 3n": replace(
        LLAMA,
        attention=(
            replace(OWN, window=3, uses_local_rope=True),
            replace(OWN, reads_layer=0),
        ),
        local_rope=ROPE,
        activation="gelu_tanh",
        has_post_norms=True,
        layer_inputs=LayerInputConfig(
            hidden_size=32, size=8, num_layers=2, vocab_size=30, norm_eps=1e-6
        ),
        altup=AltUpConfig(hidden_size=32, num_streams=3, laurel_rank=8, norm_eps=1e-6),
        gate_deviations=(0.0, 0.5),
    ),
    "norms after, of all heads or after rotation": replace(
        LLAMA,
        attention=(JOINT, replace(OWN, head_norm=HeadNormConfig(eps=1e-6, is_after_rotation=True))),
        has_pre_norms=False,
        has_post_norms=True,
    ),
    "in parallel, by layer norms": replace(
        LLAMA,
        attention=(
            replace(ATTENTION, head_norm=LAYER_NORMED, has_interleaved_rope=True),
            replace(ATTENTION, has_sinks=True, scales_queries=True),
        ),
        query_scaling=QueryScaling(beta=0.3, length=3),
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=True,
        has_gate=False,
        activation="relu2",
    ),
    "scaled": replace(LLAMA, residual_scale=0.4),
}


CALLS = {"rms_norm": 1, "add_rms_norm": 4, "rope_write": 2, "latent_write": 0}
OTHER_CALLS = {
    "gemma": {"rms_norm": 5},
    "latents": {"rms_norm": 3, "rope_write": 0, "latent_write": 2},
    "chosen latents": {"rms_norm": 3, "rope_write": 0, "latent_write": 3, "choose_slots": 1},
}


def decoder_of(config: DecoderConfig, device: torch.device) -> Decoder:
    decoder = Decoder(config, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(0)
    for target in decoder_targets(decoder):
        target.into.copy_(torch.randn(target.into.shape, generator=generator) * 0.3)
    decoder.prepare()
    return decoder


def step_of(decoder: Decoder, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, PagedStep]:
    """A row of one token over a past of six, and a chunk of five over a past of two."""
    kv = KvCache(decoder.config.kv_layout(PAGE, torch.float32), NUM_PAGES, device)
    generator = torch.Generator().manual_seed(1)
    for pages in kv.tensors:
        pages.copy_(torch.randn(pages.shape, generator=generator))
        pages[-1].zero_()
    lengths, contexts = np.array([1, 5]), np.array([7, 7])
    table_BM = torch.tensor([[4, 1], [0, 3]])
    row_T, positions_T = torch.tensor([0, 1, 1, 1, 1, 1]), torch.tensor([6, 2, 3, 4, 5, 6])
    slots_T = table_BM[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE
    batch = AttentionBatch(
        page_table_BM=table_BM.to(device),
        context_lengths_B=torch.tensor(contexts, device=device),
        query_starts_B=torch.tensor([0, 1], device=device),
        write_slots_T=slots_T.to(device),
        num_decode_rows=1,
        host_query_lengths_B=lengths,
        host_context_lengths_B=contexts,
    )
    return torch.arange(6, device=device) * 5, positions_T.to(device), PagedStep(kv, batch)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for module, operator in (
        (add_rms_norm, "rms_norm"),
        (add_rms_norm, "add_rms_norm"),
        (rope_write, "rope_write"),
        (latent_write, "latent_write"),
        (key_index, "choose_slots"),
    ):
        launch = getattr(module, operator)

        def counted(*given: Any, operator: str = operator, launch: Any = launch) -> Any:
            seen[operator] += 1
            return launch(*given)

        monkeypatch.setattr(module, operator, counted)
    return seen


@pytest.mark.parametrize("name", [*CONFIGS, *WITHOUT_KERNELS])
@torch.inference_mode()
def test_a_step_equals_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late_1NC = torch.randn(1, 2, 32)
    device, results = CPU, []
    for is_on_gpu in (False, True):
        if is_on_gpu:
            device = rehearse_gpu(monkeypatch)
            seen = count_calls(monkeypatch)
        decoder = decoder_of((CONFIGS | WITHOUT_KERNELS)[name], device)
        ids_T, positions_T, step = step_of(decoder, device)
        late = LateInputs(torch.tensor([1, 4], device=device), late_1NC.to(device))
        late = None if decoder.streams is not None else late
        rows_TLP = decoder.layer_inputs and decoder.layer_inputs.look_up(ids_T)
        hidden_TC = decoder.run(decoder.embed(ids_T), positions_T, step, late, rows_TLP)
        results.append([tensor.cpu() for tensor in (hidden_TC, *step.kv.tensors)])
    monkeypatch.undo()
    expected_calls = Counter(CALLS | OTHER_CALLS.get(name, {}))
    assert name in WITHOUT_KERNELS or seen == expected_calls
    assert results[0][0].std() > 0.1
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
