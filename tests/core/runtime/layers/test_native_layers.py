"""All layers in one native call against the same layers in torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.native_pages import in_native_order, pages_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import (
    AttentionConfig,
    HeadNormConfig,
    KvCache,
    PagedStep,
)
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.rotary import RopeConfig

CPU = torch.device("cpu")
PAGE_SIZE = 8
PLAIN = AttentionConfig(hidden_size=72, num_heads=6, num_kv_heads=2, head_dim=20)
VARIANTS = {
    "llama": (PLAIN, PLAIN, 20),
    "qwen2 with biases": (replace(PLAIN, has_qkv_bias=True, has_out_bias=True),) * 2 + (20,),
    "qwen3 with head norms": (replace(PLAIN, head_norm=HeadNormConfig(eps=1e-6)),) * 2 + (20,),
    "mistral with a window": (replace(PLAIN, window=7),) * 2 + (20,),
    "smollm3 with a layer without rotation": (PLAIN, replace(PLAIN, uses_rope=False), 20),
    "part of a head rotated": (PLAIN, PLAIN, 12),
    "heads of 64": (replace(PLAIN, head_dim=64),) * 2 + (64,),
}
# Queries and context of each row: decode rows first.
ROWS = [(1, 5), (1, 70), (9, 9), (40, 50)]


def parameters(decoder: Decoder) -> list[torch.Tensor]:
    tensors = [decoder.head.weight_OI, decoder.embedding.weight_OI, decoder.norm.weight_C]
    for layer in decoder.layers:
        tensors += [layer.input_norm.weight_C, layer.mlp_norm.weight_C]
        for linear in (
            layer.attention.qkv,
            layer.attention.out,
            layer.mlp.gate_up,
            layer.mlp.down,
        ):
            tensors += [linear.weight_OI] + ([] if linear.bias_O is None else [linear.bias_O])
        if layer.attention.norm is not None:
            tensors += [layer.attention.norm.query, layer.attention.norm.key]
    return tensors


def make_decoder(variant: str, dtype: torch.dtype, kernels: NativeKernels | None = None) -> Decoder:
    first, second, num_rotated = VARIANTS[variant]
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=72,
        intermediate_size=90,
        norm_eps=1e-5,
        attention=(first, second),
        rope=RopeConfig(num_rotated_dims=num_rotated, max_length=128, trained_length=128),
        has_mlp_bias=first.has_out_bias,
    )
    decoder = Decoder(config, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in parameters(decoder):
        values = torch.randn(tensor.shape, generator=generator).bfloat16()
        tensor.copy_(values * 0.15 if tensor.dim() == 2 and len(tensor) > 2 else values * 0.2 + 1)
    decoder.prepare(kernels)
    return decoder


def run(
    decoder: Decoder, rows: list[int], kernels: NativeKernels | None, cache: torch.dtype
) -> torch.Tensor:
    """One step of the chosen rows of `ROWS`, over a past of random keys and values."""
    lengths, contexts = (np.array([ROWS[row][which] for row in rows]) for which in (0, 1))
    pages_per_row = 10
    kv = KvCache(
        decoder.config.kv_layout(PAGE_SIZE, cache), pages_per_row * len(ROWS), CPU, kernels
    )
    generator = torch.Generator().manual_seed(1)
    for pages in kv.pages:
        past = torch.randn(2, *pages.k_NPKD.shape, generator=generator).bfloat16()
        past[:, -1] = 0
        filled = pages_of(*past, cache)
        filled = filled if kv.native is None else in_native_order(filled, kv.native)
        for tensor, values in zip(pages.tensors, filled.tensors, strict=True):
            tensor.copy_(values)
    table_BM = torch.arange(pages_per_row * len(ROWS)).view(len(ROWS), -1)[rows]
    row_T = np.repeat(np.arange(len(rows)), lengths)
    starts = np.cumsum(lengths) - lengths
    positions_T = torch.from_numpy(np.arange(len(row_T)) - (starts - contexts + lengths)[row_T])
    page_T = table_BM[torch.from_numpy(row_T), positions_T // PAGE_SIZE]
    batch = AttentionBatch(
        page_table_BM=table_BM,
        context_lengths_B=torch.from_numpy(contexts),
        query_starts_B=torch.from_numpy(starts),
        write_slots_T=page_T * PAGE_SIZE + positions_T % PAGE_SIZE,
        num_decode_rows=int((lengths == 1).sum()),
        host_query_lengths_B=lengths,
        host_context_lengths_B=contexts,
        native=kv.native,
    )
    ids_T = (positions_T * 7 + torch.from_numpy(np.array(rows))[row_T] * 11) % 50
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids_T, positions_T, PagedStep(kv, batch)))


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return ((logits.float() - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_close_to_float32_as_torch_in_bfloat16(
    kernels: NativeKernels, variant: str, cache: torch.dtype
) -> None:
    rows = list(range(len(ROWS)))
    exact = run(make_decoder(variant, torch.float32), rows, None, torch.float32)
    by_torch = run(make_decoder(variant, torch.bfloat16), rows, None, cache)
    decoder = make_decoder(variant, torch.bfloat16, kernels)
    ours = run(decoder, rows, kernels, cache)
    assert error(ours, exact) < max(1.1 * error(by_torch, exact), 0.01)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("variant", ["llama", "heads of 64"])
def test_a_row_is_bitwise_the_same_in_any_batch(
    kernels: NativeKernels, variant: str, cache: torch.dtype
) -> None:
    decoder = make_decoder(variant, torch.bfloat16, kernels)
    together = run(decoder, list(range(len(ROWS))), kernels, cache)
    for row, expected in enumerate(together.split([length for length, _ in ROWS])):
        assert torch.equal(run(decoder, [row], kernels, cache), expected)
    last_two = run(decoder, [1, 3], kernels, cache)
    assert torch.equal(last_two[1:], together[-40:])


def test_a_cache_beyond_its_limits_runs_in_torch(kernels: NativeKernels) -> None:
    decoder = make_decoder("llama", torch.bfloat16, kernels)
    exact = run(make_decoder("llama", torch.float32), [0, 2], None, torch.float32)
    half = run(decoder, [0, 2], kernels, torch.float16)
    assert error(half, exact) < 0.05
