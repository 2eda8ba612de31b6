"""The decoder: one config-driven stack for every family of decoder-only language models.

Owns the layers and their order. Reads no configuration file and no checkpoint: families translate
theirs into `DecoderConfig` and fill the parameters through views.

Shapes: T tokens, R rows of logits, C hidden, V vocabulary, F MLP features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.kernels.native.library import NativeKernels
from triptych.core.kernels.paged_attention import AttentionBatch
from triptych.core.kernels.silu_and_mul import silu_and_mul
from triptych.core.layers.attention import Attention, AttentionConfig, KvCache, KvLayout
from triptych.core.layers.linear import Linear
from triptych.core.layers.native_layers import NativeLayers, can_fuse
from triptych.core.layers.norm import RMSNorm
from triptych.core.layers.rotary import RopeConfig, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything that tells one decoder from another. `attention` has one entry per layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    attention: tuple[AttentionConfig, ...]
    rope: RopeConfig
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache this model needs."""
        first = self.attention[0]
        return KvLayout(
            num_layers=len(self.attention),
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            page_size=page_size,
            dtype=dtype,
        )


class Mlp:
    """`down(silu(gate(x)) * up(x))`, gate and up as one projection."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, features, bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.gate_up = Linear(hidden, 2 * features, has_bias=bias, dtype=dtype, device=device)
        self.down = Linear(features, hidden, has_bias=bias, dtype=dtype, device=device)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor) -> torch.Tensor:
        """Returns the new residual."""
        return self.down(silu_and_mul(self.gate_up(x_TC)), residual_TC)


class DecoderLayer:
    """Attention and MLP, each behind its norm."""

    def __init__(
        self, config: DecoderConfig, *, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.attention = Attention(config.attention[layer], layer=layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.mlp = Mlp(config, dtype, device)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.attention.prepare(native)
        self.mlp.gate_up.prepare(native)
        self.mlp.down.prepare(native)

    def __call__(
        self,
        x_TC: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv: KvCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """One layer of the residual stream."""
        x_TC = self.attention(self.input_norm(x_TC), x_TC, cos_sin, kv, batch)
        return self.mlp(self.mlp_norm(x_TC), x_TC)


@dataclass(frozen=True, slots=True)
class LateInputs:
    """What is added to some positions after the first layers, layer by layer.

    Shapes: L layers, F positions.
    """

    index_F: torch.Tensor
    values_LFC: torch.Tensor


class DecoderStack:
    """Layers and final norm: from embedded positions to hidden states.

    Parameters are allocated uninitialised: fill them, then call `prepare` once.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.layers = [
            DecoderLayer(config, layer=layer, dtype=dtype, device=device)
            for layer in range(len(config.attention))
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)
        self._rotary = Rotary(config.rope, device)
        self._fused: NativeLayers | None = None

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses, one at a time.

        With `native` kernels that take them, all layers run in one call.
        """
        for layer in self.layers:
            layer.prepare(native)
        if native is not None and can_fuse(self):
            self._fused = NativeLayers(self, native)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine rows of a step's positions, for all layers."""
        return self._rotary.rows(positions, self.dtype)

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        kv: KvCache,
        batch: AttentionBatch,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """The last hidden state of every position, normalised; `x_TC` may be overwritten.

        `positions` are [T], or [3, T] (see `core.layers.rotary`).
        """
        cos_sin = self.rotations(positions)
        if late is None and self._fused is not None and self._fused.can_read(kv):
            return self._fused(x_TC, cos_sin, kv, batch)
        for index, layer in enumerate(self.layers):
            x_TC = layer(x_TC, cos_sin, kv, batch)
            if late is not None and index < len(late.values_LFC):
                x_TC = x_TC.index_add(0, late.index_F, late.values_LFC[index])
        return self.norm(x_TC)


class Decoder(DecoderStack):
    """Embedding, layers, final norm, and the projection onto the vocabulary."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self.head = Linear(
            config.hidden_size, config.vocab_size, has_bias=False, dtype=dtype, device=device
        )
        self.embedding_VC = (
            self.head.weight_OI
            if config.has_tied_embeddings
            else torch.empty_like(self.head.weight_OI)
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def prepare(self, native: NativeKernels | None = None) -> None:
        """As for a stack; the projection too."""
        super().prepare(native)
        self.head.prepare(native)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """What enters the layers: `x_TC`."""
        return self.embedding_VC.index_select(0, token_ids_T)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv: KvCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """The last hidden state of every token, normalised: `hidden_TC`."""
        return self.run(self.embed(token_ids_T), positions_T, kv, batch)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary for each row: `logits_RV`."""
        return self.head(hidden_RC)
