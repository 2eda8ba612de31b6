"""Whisper's network, built of transformers' modules: encode, decode tokens, align them with time.

Owns loading, the caches of one window, the alignment heads, and dynamic time warping over their
attention, after OpenAI's `timing.py`. Knows neither the order of windows nor the meaning of tokens.

Shape suffixes: M mel bins, F frames, P encoder positions, D width, T tokens, V
vocabulary, H attention heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.whisper.configuration_whisper import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperForConditionalGeneration

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.modalities.asr.spec import WhisperSpec

_TIED = "proj_out.weight"


class WhisperNetwork:
    """Weights on a device, without state of any window."""

    def __init__(self, network: WhisperForConditionalGeneration, spec: WhisperSpec) -> None:
        self.spec = spec
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self._network = network.eval().requires_grad_(False)
        self._encoder = network.model.encoder
        self.decoder: nn.Module = network.model.decoder
        self.aligned_heads: dict[int, list[int]] = {}
        """Alignment heads by layer: their attention follows the words."""
        for layer, head in spec.alignment_heads:
            self.aligned_heads.setdefault(layer, []).append(head)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        spec: WhisperSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
        report: Callable[[float], None] | None = None,
    ) -> WhisperNetwork:
        """The network of a folder. Raises `WeightsError` if a tensor is missing or unused."""
        with torch.device("meta"):
            network = _network(checkpoint.config, is_cpu=device.type == "cpu")
        network.to(dtype).to_empty(device=device)
        network.tie_weights()
        targets = (TensorTarget(name, value) for name, value in network.named_parameters())
        load_tensors(checkpoint, targets, ignored=(_TIED,), report=report)
        pack_linears(network, native)
        return cls(network, spec)

    @staticmethod
    def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """Bytes needed for the weights."""
        with torch.device("meta"):
            network = _network(checkpoint.config, is_cpu=False)
        num_values: int = sum(value.numel() for value in network.parameters())
        return num_values * dtype.itemsize

    def embed(self, window_MF: Tensor) -> Tensor:
        """The input of the encoder's layers [1, P, D], from a spectrogram."""
        encoder, gelu = self._encoder, nn.functional.gelu
        hidden_1DP = gelu(encoder.conv1(window_MF[None].to(self.device, self.dtype)))
        hidden_1PD = gelu(encoder.conv2(hidden_1DP)).transpose(1, 2)
        embedded: Tensor = hidden_1PD + encoder.embed_positions.weight
        return embedded

    def encode(self, hidden_1PD: Tensor, layer: int) -> Tensor:
        """Run one layer of the encoder; the last one includes the final norm."""
        encoded_1PD: Tensor = self._encoder.layers[layer](hidden_1PD, None)
        is_last = layer == self.spec.config.encoder_layers - 1
        return self._encoder.layer_norm(encoded_1PD) if is_last else encoded_1PD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] in float32."""
        projected: Tensor = self._network.proj_out(hidden_TD)
        return projected.float()

    def queries(self, layer: int) -> nn.Module:
        """The projection to the cross-attention queries of a layer."""
        module: nn.Module = self.decoder.get_submodule(f"layers.{layer}.encoder_attn.q_proj")
        return module


class WhisperWindow:
    """One encoded window, and the tokens fed so far."""

    def __init__(self, network: WhisperNetwork, encoded_1PD: Tensor) -> None:
        self._network = network
        self._encoded_1PD = encoded_1PD
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Feed more tokens; returns the decoder's hidden states [T, D]."""
        ids_1T = to_device(torch.tensor([token_ids]), self._network.device)
        # Positional: `past_key_values` became `cache` in transformers 5.24.
        hidden_1TD: Tensor = self._network.decoder(
            ids_1T, None, self._encoded_1PD, self._cache, use_cache=True
        ).last_hidden_state
        return hidden_1TD[0]

    def rewind(self, num_tokens: int) -> None:
        """Drop all except the first `num_tokens` from the cache."""
        num_too_many = self._cache.get_seq_length() - num_tokens
        if num_too_many > 0:
            self._cache.self_attention_cache.crop(-num_too_many)

    def attention(self, token_ids: Sequence[int], num_positions: int) -> Tensor:
        """The attention of each token to the first positions [H, T, P], by alignment head.

        Feeds `token_ids` from the start.
        """
        network = self._network
        kept: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(_module: nn.Module, _inputs: Any, output_1TD: Tensor) -> None:
                kept[layer] = output_1TD[0]

            return hook

        self.rewind(0)
        with ExitStack() as hooks:
            for layer in network.aligned_heads:
                handle = network.queries(layer).register_forward_hook(keep(layer))
                hooks.callback(handle.remove)
            self.feed(token_ids)
        layers = [
            self._layer_attention(kept[layer], layer, heads, num_positions)
            for layer, heads in network.aligned_heads.items()
        ]
        return torch.cat(layers)

    def _layer_attention(
        self, queries_TD: Tensor, layer: int, heads: Sequence[int], num_positions: int
    ) -> Tensor:
        keys_HPd = self._cache.cross_attention_cache.layers[layer].keys[0]
        width = keys_HPd.shape[-1]
        queries_HTd = queries_TD.unflatten(-1, (-1, width)).transpose(0, 1)
        chosen = to_device(torch.tensor(heads), queries_TD.device)
        keys_HPd, queries_HTd = (x.index_select(0, chosen) for x in (keys_HPd, queries_HTd))
        scores_HTP = queries_HTd.float() @ keys_HPd[:, :num_positions].float().transpose(1, 2)
        attention_HTP: Tensor = (scores_HTP * width**-0.5).softmax(-1)
        return attention_HTP


def _network(config: dict[str, Any], *, is_cpu: bool) -> WhisperForConditionalGeneration:
    parsed = WhisperConfig.from_dict(config)
    parsed._attn_implementation = "sdpa"
    network = WhisperForConditionalGeneration(parsed)
    if is_cpu:  # torch's fused attention takes seven times as long for one query in bfloat16
        plain = copy.copy(parsed)
        plain._attn_implementation = "eager"
        for module in network.model.decoder.modules():
            if hasattr(module, "config"):
                module.config = plain
    return network


Matrix = npt.NDArray[np.float64]


def token_positions(
    attention_HTP: Tensor, spoken: slice, median_width: int
) -> npt.NDArray[np.int64]:
    """The position at which each token of `spoken` starts.

    Attention is normalized over all T tokens, including the special ones around `spoken`.
    """
    std_H1P, mean_H1P = torch.std_mean(attention_HTP, dim=1, keepdim=True, correction=0)
    scaled_HTP = (attention_HTP - mean_H1P) / std_H1P.clamp(min=1e-9)
    smooth_TP = median_filter(scaled_HTP, median_width).mean(0)[spoken]
    rows, positions = warp(-HostCopy(smooth_TP.double()).get().numpy())
    is_first = np.diff(rows, prepend=-1).astype(bool)
    starts: npt.NDArray[np.int64] = positions[is_first]
    return starts


def median_filter(values_HTP: Tensor, width: int) -> Tensor:
    """The median of `width` neighbors along the last dimension, mirrored at its ends."""
    margin = width // 2
    if values_HTP.shape[-1] <= margin:
        return values_HTP
    padded = torch.nn.functional.pad(values_HTP, (margin, margin), mode="reflect")
    return padded.unfold(-1, width, 1).median(-1).values


def warp(cost_TP: Matrix) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the cheapest monotonic path from the first corner to the last.

    Computes whole anti-diagonals at a time. In ties the diagonal step comes last, as in the
    reference.
    """
    num_rows, num_columns = cost_TP.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0.0
    origin = np.zeros((num_rows + 1, num_columns + 1), np.int8)
    for diagonal in range(2, num_rows + num_columns + 1):
        row = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = (
            total[row - 1, column - 1],
            total[row - 1, column],
            total[row, column - 1],
        )
        come_from = np.where(
            (both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2)
        )
        best = np.choose(come_from, (both, down, right))
        total[row, column] = cost_TP[row - 1, column - 1] + best
        origin[row, column] = come_from
    return _path(origin)


def _path(origin: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    origin[0, :], origin[:, 0] = 2, 1
    row, column = origin.shape[0] - 1, origin.shape[1] - 1
    path = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        come_from = origin[row, column]
        row -= come_from != 2
        column -= come_from != 1
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns
