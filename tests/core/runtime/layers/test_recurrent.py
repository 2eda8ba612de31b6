"""Recurrent layers: native kernels against torch, and a row in any company and in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.core.runtime.kernels.native import state_arguments
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep
from triptych.core.runtime.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from triptych.core.runtime.layers.mamba2 import Mamba2, Mamba2Config
from triptych.core.runtime.layers.short_convolution import ShortConvConfig, ShortConvolution
from triptych.core.runtime.layers.states import StateBatch, StateCut

CPU = torch.device("cpu")
NO_POSITIONS: Any = None
DELTA = {"hidden_size": 40, "num_key_heads": 2, "width": 4, "norm_eps": 1e-6}
MAMBA = {"hidden_size": 40, "width": 4, "norm_eps": 1e-5}
CONFIGS = {
    "delta net": DeltaNetConfig(**DELTA, num_value_heads=6, key_dim=16, value_dim=80),
    "delta net of odd sizes": DeltaNetConfig(**DELTA, num_value_heads=2, key_dim=11, value_dim=21),
    "a decay for each key value": DeltaNetConfig(
        **DELTA,
        num_value_heads=2,
        key_dim=21,
        value_dim=80,
        has_key_decays=True,
        low_rank=5,
        gate="sigmoid",
        beta_scale=2.0,
    ),
    "mamba 2": Mamba2Config(**MAMBA, num_heads=6, num_groups=2, head_dim=16, state_dim=32),
    "mamba 2 of odd sizes": Mamba2Config(
        **MAMBA, num_heads=3, num_groups=1, head_dim=7, state_dim=19, step_limits=(0.1, 0.9)
    ),
    "mamba 2 without a norm": Mamba2Config(
        **MAMBA,
        num_heads=3,
        num_groups=1,
        head_dim=16,
        state_dim=16,
        has_norm=False,
        input_scales=(0.5, 1.5, 0.7, 1.2, 0.9),
        out_scale=0.6,
    ),
    "short convolution": ShortConvConfig(hidden_size=40, width=3, has_bias=True),
}
LAYERS: dict[type, Any] = {
    DeltaNetConfig: GatedDeltaNet,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConvolution,
}
LENGTHS = (1, 1, 13, 40)
CUTS = (StateCut(2, 4, 6), StateCut(3, 8, 4), StateCut(3, 32, 5))


def make(name: str, dtype: torch.dtype, native: NativeKernels | None) -> Any:
    config = CONFIGS[name]
    layer = LAYERS[type(config)](config, cells=0, dtype=dtype, device=CPU)
    source = torch.Generator().manual_seed(2)
    tensors = [layer.convolution_X1K, layer.convolution_bias_X]
    tensors += [x for linear in layer.linears() for x in (linear.weight_OI, linear.bias_O)]
    if isinstance(layer, GatedDeltaNet):
        tensors += [layer.decay_log_H, layer.dt_bias_X, layer.norm_E]
    if isinstance(layer, Mamba2):
        tensors += [layer.decay_log_H, layer.dt_bias_X, layer.skip_H, layer.norm_O]
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=source) * 0.3)
    layer.prepare(native)
    return layer


class Rows:
    """Rows of a layer whose states go on from step to step."""

    def __init__(self, layer: Any, native: NativeKernels | None, dtype: torch.dtype) -> None:
        self.layer, self.native = layer, native
        layout = KvLayout(shapes=(), page_size=8, dtype=dtype, states=(layer.config.state,))
        self.kv = KvCache(layout, 1, CPU, native, num_slots=4, num_snapshots=3)
        assert self.kv.states is not None
        source = torch.Generator().manual_seed(4)
        for part in self.kv.states.layers[0]:
            part.copy_(torch.randn(part.shape, generator=source))

    def states(self) -> list[torch.Tensor]:
        assert self.kv.states is not None
        return list(self.kv.states.layers[0])

    def step(
        self, x_TC: torch.Tensor, lengths: Sequence[int], slots: Sequence[int], cuts: Any = ()
    ) -> torch.Tensor:
        starts = np.cumsum(lengths) - lengths
        batch = AttentionBatch(
            page_table_BM=torch.zeros((len(lengths), 1), dtype=torch.int64),
            context_lengths_B=torch.tensor(lengths),
            query_starts_B=torch.from_numpy(starts),
            write_slots_T=torch.zeros(len(x_TC), dtype=torch.int64),
            num_decode_rows=0,
            host_query_lengths_B=np.array(lengths),
            host_context_lengths_B=np.array(lengths),
            native=self.native,
        )
        states = StateBatch(torch.tensor(slots), slots, cuts)
        with torch.inference_mode():
            return self.layer(x_TC, None, NO_POSITIONS, PagedStep(self.kv, batch, states))


def inputs(dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(6)
    return torch.randn((sum(LENGTHS), 40), generator=source).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_compute_what_torch_does(
    kernels: NativeKernels, name: str, dtype: torch.dtype
) -> None:
    torchs = Rows(make(name, dtype, None), None, dtype)
    natives = Rows(make(name, dtype, kernels), kernels, dtype)
    outputs = [rows.step(inputs(dtype), LENGTHS, [2, 0, 3, 1], CUTS) for rows in (torchs, natives)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(
        [outputs[1], *natives.states()], [outputs[0], *torchs.states()], strict=True
    ):
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_bitwise_the_same_in_any_company_and_chunks(
    kernels: NativeKernels, name: str, dtype: torch.dtype
) -> None:
    layer, x_TC = make(name, dtype, kernels), inputs(dtype)
    together, alone = (Rows(layer, kernels, dtype) for _ in range(2))
    expected = together.step(x_TC, LENGTHS, [2, 0, 3, 1], CUTS)[-40:]
    x_TC, found = x_TC[-40:], []
    for start, stop in ((0, 1), (1, 8), (8, 31), (31, 32), (32, 40)):
        found.append(alone.step(x_TC[start:stop], [stop - start], [1]))
        for part, kept in zip(alone.states(), together.states(), strict=True):
            if stop in (8, 32):
                assert torch.equal(part[1], kept[4 if stop == 8 else 5])
    assert torch.equal(torch.cat(found), expected)
    for part, kept in zip(alone.states(), together.states(), strict=True):
        assert torch.equal(part[1], kept[1])


def test_the_limits_are_those_of_the_kernels() -> None:
    header = Path(state_arguments.__file__).with_name("states.h").read_text()
    limits = f"MAX_WIDTH = {state_arguments.MAX_WIDTH}, MAX_HEAD = {state_arguments.MAX_HEAD}"
    assert limits in header
