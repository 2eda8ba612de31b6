"""EAGLE-3: a head of one layer over three of its target's hidden states.

Owns its arithmetic, its configuration and the names of its tensors. Li et al. 2025
(arXiv:2503.01840), in the layout of vLLM and SGLang (`LlamaForCausalLMEagle3`): `fc` makes one row
of the three states; the layer attends over the normed embedding and the normed row side by side;
its result goes through `norm` to a projection on a smaller vocabulary, whose token n is token
n + `d2t[n]` of the target's.

Shapes: T tokens, R rows of logits, C hidden, V vocabulary of the target, W = C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triptych.core.errors import ConfigError, WeightsError
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.decoders.families.qwen import with_axes
from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.heads.protocol import UNKNOWN_SCORE, FilledTokens
from triptych.core.runtime.decoders.hf_config import CausalLmConfig, parse
from triptych.core.runtime.decoders.native import (
    NativeBlueprint,
    gathered_values,
    position_values,
)
from triptych.core.runtime.decoders.projection_targets import norm_targets
from triptych.core.runtime.decoders.tensor_names import layer_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import Attention, KvLayout, PagedStep, StepPositions
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import (
    DecoderConfig,
    DecoderLayer,
    Mlp,
    new_norm,
)
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.rotary import Rotary
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, TensorTarget, load_tensors

_NUM_STATES = 3
_FIRST_NORM = "hidden_norm.weight"
_OFFSETS = "d2t"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head's layer, and what surrounds it.

    The layer's residual is the row, or the normed row. `embeds` and `projects` by itself, or with
    the target's weights. `vocab_size` counts the tokens that it drafts; `is_mapped`: these are a
    choice of the target's.
    """

    layer: DecoderConfig
    target_size: int
    vocab_size: int
    is_mapped: bool
    embeds: bool
    projects: bool
    has_fuse_bias: bool
    has_normed_residual: bool


class EagleHead:
    """Implements `core.runtime.decoders.heads.protocol.ChainHead`. Fill it, then call `join`."""

    def __init__(self, config: EagleConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, layer, size = config, config.layer, config.layer.hidden_size
        self.row_size, self.has_axes = size, bool(layer.rope.sections)
        new = partial(Linear, dtype=dtype, device=device)
        self.fc = new(_NUM_STATES * config.target_size, size, has_bias=config.has_fuse_bias)
        self.hidden_norm, self.norm = (
            new_norm(layer, dtype=dtype, device=device) for _ in range(2)
        )
        self.layer = DecoderLayer(layer, layer=0, dtype=dtype, device=device)
        assert isinstance(self.layer.attention, Attention)
        assert isinstance(self.layer.mlp, Mlp)
        self._attention, self._mlp = self.layer.attention, self.layer.mlp
        inside = self._attention.config
        self._attention.qkv = new(2 * size, inside.num_outputs, has_bias=inside.has_qkv_bias)
        self.embedding = new(size, layer.vocab_size, has_bias=False)
        self.head = new(size, config.vocab_size, has_bias=False)
        self._ids: torch.Tensor | None = None  # of its tokens: offsets to them, until it joins
        if config.is_mapped:
            self._ids = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)
        self._rotary, self._dtype = Rotary(layer.rope, device), dtype
        self.vocab_size = config.vocab_size

    def targets(self, names: Sequence[str]) -> Iterator[Target]:
        """The tensors of a checkpoint with these `names`, and their destinations."""
        config, find = self.config, _Names(names)
        yield from layer_targets(find.layer, self.layer, config.layer)
        yield from norm_targets(f"{find.layer}.hidden_norm", self.hidden_norm)
        yield from norm_targets(find("norm.weight").removesuffix(".weight"), self.norm)
        yield TensorTarget(find("fc.weight"), self.fc.weight_OI)
        if self.fc.bias_O is not None:
            yield TensorTarget(find("fc.bias"), self.fc.bias_O)
        if config.embeds:
            yield TensorTarget(find("embed_tokens.weight"), self.embedding.weight_OI)
        if config.projects:
            yield TensorTarget(find("lm_head.weight"), self.head.weight_OI)
        if self._ids is not None:
            yield TensorTarget(find(_OFFSETS), self._ids)

    def join(self, target: Decoder, native: NativeKernels | None) -> None:
        """Prepare the loaded weights, and take those that it lacks from the target.

        Raises `WeightsError` where it drafts tokens that the target does not have.
        """
        for norm in (self.hidden_norm, self.norm):
            norm.prepare()
        self.layer.prepare(native)
        self.fc.prepare(native)
        if self._ids is None and self.config.vocab_size != target.vocab_size:
            shape, device = self.config.vocab_size, target.head.device
            self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        if self._ids is not None:
            self._ids += torch.arange(len(self._ids), device=self._ids.device)
            if self._ids.min() < 0 or self._ids.max() >= target.vocab_size:
                raise WeightsError(
                    f"Tensor {_OFFSETS!r} of the head names tokens that the model does not have."
                )
        if self.config.projects:
            self.head.prepare(native)
        else:
            self.head = target.head
        if not self.config.embeds:
            self.embedding = target.embedding
        self.vocab_size = target.vocab_size

    def fuse(self, states_TC: Sequence[torch.Tensor]) -> torch.Tensor:
        """Project three states onto one row; see `Head.fuse`."""
        return self.fc(torch.cat([*states_TC], dim=1))

    def forward(
        self,
        token_ids_T: torch.Tensor,
        rows_TW: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        filled: FilledTokens | None = None,
    ) -> torch.Tensor:
        """Compute the residual stream after the layer; see `ChainHead.forward`."""
        rotation = self._rotary.rows(positions, self._dtype)
        places = StepPositions(rotation, rotation)
        embedded_TC = self.embedding.rows(token_ids_T)
        if filled is not None and filled.inputs_FC.shape[1] == embedded_TC.shape[1]:
            embedded_TC = filled.fill(embedded_TC)
        embedded_TC = self.layer.input_norm(embedded_TC)
        normed_TC = self.hidden_norm(rows_TW)
        residual_TC = normed_TC if self.config.has_normed_residual else rows_TW
        pairs_TX = torch.cat([embedded_TC, normed_TC], dim=1)
        x_TC = self._attention(pairs_TX, residual_TC, places, step)
        return self._mlp(self.layer.mlp_norm(x_TC), x_TC)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the target's vocabulary; see `Head.logits`."""
        scores_RV = self.head(self.norm(hidden_RC), out_dtype=torch.float32)
        if self._ids is None:
            return scores_RV
        logits_RV = scores_RV.new_full((len(scores_RV), self.vocab_size), UNKNOWN_SCORE)
        return logits_RV.index_copy_(1, self._ids, scores_RV)


class EagleBlueprint:
    """Implements `core.runtime.decoders.heads.protocol.HeadBlueprint` for EAGLE-3.

    Raises `ConfigError` for a checkpoint that is no such head, or none for the target.
    """

    block_size = 0

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: NativeBlueprint,
        native: NativeKernels | None,
        name: str,
    ) -> None:
        fields, names = _flat(checkpoint.config), list(checkpoint.tensors)
        self._where = name
        self._check_layer(fields, names)
        self.config = _read(fields, _Names(names), target)
        self._check_sizes(target)
        self.hidden_layers = _hidden_layers(fields, len(target.config.attention))
        self._check_layers(len(target.config.attention))
        self.row_size, self.max_length = self.config.layer.hidden_size, target.max_length
        self.vocab_size = self.config.layer.vocab_size if self.config.embeds else target.vocab_size
        self.dtype, self._target_vocab = target.dtype, target.vocab_size
        self._device, self._native, self._names = target.device, native, names

    def _check_layer(self, fields: Mapping[str, Any], names: Sequence[str]) -> None:
        if not any(name.endswith(_FIRST_NORM) for name in names):
            raise ConfigError(
                f"--draft-model-path: {self._where} is no EAGLE-3 head, which has a tensor"
                f" {_FIRST_NORM!r}; for a whole model write --speculative-algorithm standalone."
            )
        if (num_layers := fields.get("num_hidden_layers", 1)) != 1:
            raise ConfigError(
                f"--draft-model-path: {self._where} has {num_layers} layers, and heads of one layer"
                " draft; name another head."
            )

    def _check_sizes(self, target: NativeBlueprint) -> None:
        config, own = self.config, target.config
        shares = not (config.embeds and config.projects)
        sizes = {config.target_size, *([config.layer.hidden_size] if shares else [])}
        if sizes != {own.hidden_size}:
            raise ConfigError(
                f"--draft-model-path: {self._where} reads hidden states of {config.target_size}"
                f" values, and the model has {own.hidden_size}; name a head that was trained for"
                " this model."
            )

    def _check_layers(self, num_layers: int) -> None:
        is_known = all(0 <= layer <= num_layers for layer in self.hidden_layers)
        if len(self.hidden_layers) != _NUM_STATES or not is_known:
            raise ConfigError(
                f"--draft-model-path: {self._where} reads the states after"
                f" {', '.join(map(str, self.hidden_layers))} layers, and an EAGLE-3 head reads"
                f" {_NUM_STATES} of a model, which has {num_layers} layers here."
            )

    def weight_bytes(self) -> int:
        """Bytes of its own weights."""
        sketch = EagleHead(self.config, dtype=self.dtype, device=torch.device("meta"))
        targets = sketch.targets(self._names)
        return sum(target.num_bytes(self.dtype.itemsize) for target in targets)

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that one step holds in addition to weights and cache."""
        layer = self.config.layer
        values = num_tokens * (position_values(layer) + 4 * layer.hidden_size)
        if self._device.type == "cpu" and self._native is None:
            values += gathered_values(layer, num_tokens, num_rows)
        logits = logits_bytes(num_rows, self._target_vocab) + 4 * num_rows * self.config.vocab_size
        return max(values * self.dtype.itemsize, logits)

    def target_bytes(self, num_tokens: int) -> int:
        """The bytes that a step of the target holds for it: states, and rows."""
        values = 2 * _NUM_STATES * self.config.target_size + self.row_size
        return num_tokens * values * self.dtype.itemsize

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the head's own cells."""
        return self.config.layer.kv_layout(page_size, dtype)

    def build(
        self, checkpoint: Checkpoint, target: Decoder, report: Callable[[float], None]
    ) -> EagleHead:
        """Load the weights; see `HeadBlueprint.build`."""
        head = EagleHead(self.config, dtype=self.dtype, device=self._device)
        load_tensors(checkpoint, head.targets(self._names), ignored=_is_unused, report=report)
        head.join(target, self._native)
        return head


class _Names:
    """The names of a checkpoint's tensors, which may have a module's name before them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, last: str) -> str:
        """The tensor whose name ends so; `last` itself if there is none."""
        found = (name for name in self._names if name in (last, f"model.{last}"))
        return next(found, last)

    def has(self, last: str) -> bool:
        """Whether there is such a tensor."""
        return self(last) in self._names

    @property
    def layer(self) -> str:
        """The name of the layer: `midlayer`, or `layers.0`."""
        first = next(name for name in self._names if name.endswith(_FIRST_NORM))
        return first.removesuffix(f".{_FIRST_NORM}")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose layer's fields are its own, as speculators' are not."""
    inner = config.get("transformer_layer_config")
    return {**inner, **config} if isinstance(inner, Mapping) else dict(config)


def _read(fields: Mapping[str, Any], names: _Names, target: NativeBlueprint) -> EagleConfig:
    layer = read_decoder_config(
        {**fields, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        max_length=target.max_length,
    )
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("mrope_section"):
        alternate = bool(rope.get("mrope_interleaved"))
        layer = with_axes(layer, parse(fields, CausalLmConfig), (), is_interleaved=alternate)
    projects = names.has("lm_head.weight")
    drafted = fields.get("draft_vocab_size") if projects else None
    own = layer.vocab_size if projects else target.vocab_size
    return EagleConfig(
        layer=layer,
        target_size=fields.get("target_hidden_size") or layer.hidden_size,
        vocab_size=drafted or own,
        is_mapped=names.has(_OFFSETS),
        embeds=names.has("embed_tokens.weight"),
        projects=projects,
        has_fuse_bias=names.has("fc.bias"),
        has_normed_residual=bool(fields.get("norm_before_residual")),
    )


def _hidden_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The numbers of layers after which states are read.

    vLLM's field has them; SGLang's names the layers whose results they are. The default is that of
    both.
    """
    if own := fields.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(map(int, own))
    inner = fields.get("eagle_config")
    if isinstance(inner, Mapping) and (named := inner.get("eagle_aux_hidden_state_layer_ids")):
        return tuple(int(layer) + 1 for layer in named)
    return 2, num_layers // 2, num_layers - 3


def _is_unused(name: str) -> bool:
    """The inverse of the map of tokens, and tables of rotations."""
    return name == "t2d" or name.endswith(("rotary_emb.inv_freq", ".t2d"))
