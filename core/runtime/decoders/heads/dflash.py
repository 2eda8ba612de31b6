"""DFlash: a small decoder that drafts all tokens of a block in one pass (arXiv:2602.06036).

Owns its configuration, its weights and its computation. The target's hidden states of some layers,
projected and normalized, are the context: each layer makes keys and values of the same row. A block
is the last token of the text and masks after it; its tokens see the context and each other. What a
mask's position scores is that position's own token. Embedding and head are the target's.

Published at github.com/z-lab/dflash and in the drafts of its authors: the layers are Qwen3's.
Layers with windows, which see no later token of their block, are refused.

Shapes: T tokens, C hidden, R rows of logits, L layers of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch

from triptych.core.errors import ConfigError, WeightsError
from triptych.core.process.typed import convert, describe_mismatch
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.heads.target_ends import HeadWithEnds
from triptych.core.runtime.decoders.hf_config import Count
from triptych.core.runtime.decoders.native import (
    NativeBlueprint,
    gathered_values,
    position_values,
)
from triptych.core.runtime.decoders.projection_targets import (
    AS_STORED,
    ProjectionTarget,
    norm_targets,
)
from triptych.core.runtime.decoders.tensor_names import is_unused, stack_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import Attention, KvLayout, PagedStep
from triptych.core.runtime.layers.decoder import Decoder, DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, new_norm
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, load_tensors

_LAYERS = "Qwen3ForCausalLM"
"""The architecture whose layers the drafts have."""
_Number = Annotated[int, msgspec.Meta(ge=0)]


class _BlockFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `dflash_config`."""

    mask_token_id: _Number | None = None
    target_layer_ids: tuple[_Number, ...] = ()
    block_size: Count | None = None
    causal: bool = False
    use_swa: bool = False
    use_aux_hidden_state: bool = True
    attention_sink_bias: bool = False


class _DFlashFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a draft has in addition to those of its layers."""

    num_hidden_layers: Count
    num_target_layers: Count | None = None
    block_size: Count | None = None
    mask_token_id: _Number | None = None
    is_neox_style: bool = True
    is_causal: bool | None = None
    layer_types: tuple[str, ...] = ()
    dflash_config: _BlockFields = _BlockFields()


class DFlashHead(HeadWithEnds):
    """Implements `heads.protocol.BlockHead`. Fill it, then call `prepare` once."""

    def __init__(
        self,
        config: DecoderConfig,
        num_states: int,
        mask_token_id: int,
        target: Decoder | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = config.hidden_size
        super().__init__(target)
        self.stack = DecoderStack(config, dtype=dtype, device=device)
        self.projection = Linear(
            num_states * size, size, has_bias=False, dtype=dtype, device=device
        )
        self.hidden_norm = new_norm(config, dtype=dtype, device=device)
        self.mask_token_id = mask_token_id

    def linears(self) -> Iterator[Linear]:
        """Iterate over its own projections."""
        yield from (self.projection, *self.stack.linears())

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.stack.prepare(native)
        self.projection.prepare(native)
        self.hidden_norm.prepare()

    def fuse(self, states_TC: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the rows of the context of the target's states."""
        return self.hidden_norm(self.projection(torch.cat([*states_TC], dim=1)))

    def follow(self, rows_TW: torch.Tensor, positions_T: torch.Tensor, step: PagedStep) -> None:
        """Write the keys and values of the context; see `BlockHead.follow`."""
        places = self.stack.place(positions_T)
        for layer in self.stack.layers:
            assert isinstance(layer.attention, Attention), "its layers are Qwen3's"
            layer.attention.write(rows_TW, places, step)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC` of blocks; see `BlockHead.forward`."""
        return self.stack.run(self.ends.embed(token_ids_T), positions_T, step)


class DFlashBlueprint:
    """Implements `heads.protocol.HeadBlueprint` for a folder with a draft's own weights.

    `target` is the model that it drafts for, `name` the draft's. Raises `ConfigError` for a draft
    of another model, or of a kind that does not run here, and `WeightsError` for a damaged one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: NativeBlueprint,
        native: NativeKernels | None,
        name: str,
    ) -> None:
        fields = _read(checkpoint.config)
        plain = {**checkpoint.config, "architectures": [_LAYERS]}
        config = read_decoder_config(plain, max_length=0)
        self.config = replace(config, vocab_size=target.vocab_size)
        self.hidden_layers = _hidden_layers(name, fields, len(target.config.attention))
        self.mask_token_id = _mask_token_id(name, fields, target.vocab_size)
        _check(name, fields, config, target.config.hidden_size)
        self.block_size = fields.block_size or fields.dflash_config.block_size or 16
        self.row_size = config.hidden_size
        self.max_length, self.vocab_size = config.rope.max_length, target.vocab_size
        self.dtype, self._device, self._native = target.dtype, target.device, native

    def weight_bytes(self) -> int:
        """Bytes of its own parameters."""
        head = self._new(torch.device("meta"))
        return sum(target.num_bytes(self.dtype.itemsize) for target in self._targets(head))

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that a step holds in addition to weights and cache."""
        config = self.config
        values = num_tokens * position_values(config)
        if self._device.type == "cpu" and self._native is None:
            values += gathered_values(config, num_tokens, num_rows * self.block_size)
        num_logits = num_rows * self.block_size
        return max(values * self.dtype.itemsize, logits_bytes(num_logits, self.vocab_size))

    def target_bytes(self, num_tokens: int) -> int:
        """The bytes that a step of the target holds for it: states, side by side, and rows."""
        num_states = 2 * len(self.hidden_layers) + 1
        return num_tokens * num_states * self.row_size * self.dtype.itemsize

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of its cells."""
        return self.config.kv_layout(page_size, dtype)

    def build(
        self, checkpoint: Checkpoint, target: Decoder, report: Callable[[float], None]
    ) -> DFlashHead:
        """Load it from its folder. Raises `WeightsError` naming tensor and file."""
        head = self._new(self._device, target)
        load_tensors(checkpoint, self._targets(head), ignored=is_unused, report=report)
        head.prepare(self._native)
        return head

    def _new(self, device: torch.device, target: Decoder | None = None) -> DFlashHead:
        return DFlashHead(
            self.config,
            len(self.hidden_layers),
            self.mask_token_id,
            target,
            dtype=self.dtype,
            device=device,
        )

    def _targets(self, head: DFlashHead) -> Iterator[Target]:
        rows = Shard.whole(self.config.hidden_size)
        yield ProjectionTarget("fc.weight", head.projection, 0, rows, AS_STORED)
        yield from norm_targets("hidden_norm", head.hidden_norm)
        yield from stack_targets(head.stack, "")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of such a draft."""
    return "dflash_config" in config or "DFlashDraftModel" in (config.get("architectures") or ())


def _read(config: Mapping[str, Any]) -> _DFlashFields:
    if not is_dflash(config):
        raise ConfigError(
            "--draft-model-path: the folder has no DFlash draft; its config.json would have"
            " dflash_config."
        )
    try:
        return convert(dict(config), _DFlashFields)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, config)
        raise WeightsError(f"config.json is not usable: {reason}.") from None


def _hidden_layers(name: str, fields: _DFlashFields, own_layers: int) -> tuple[int, ...]:
    """The numbers of layers after which states are read; those of files count from 0."""
    num_layers = fields.num_target_layers or own_layers
    ids = fields.dflash_config.target_layer_ids or _even_layers(
        num_layers, fields.num_hidden_layers
    )
    if num_layers != own_layers or max(ids) >= num_layers:
        raise ConfigError(
            f"--draft-model-path: {name} reads layers of a model of {num_layers}, not of"
            f" {own_layers}; name the draft of this model."
        )
    return tuple(number + 1 for number in ids)


def _even_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers of a draft that names none: evenly from the second to the fourth from the end."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + number * span / (num_layers - 1)) for number in range(num_layers))


def _mask_token_id(name: str, fields: _DFlashFields, vocab_size: int) -> int:
    own = fields.dflash_config.mask_token_id
    found = fields.mask_token_id if own is None else own
    if found is None or found >= vocab_size:
        raise ConfigError(
            f"--draft-model-path: {name} names no mask_token_id within the vocabulary of"
            f" {vocab_size}; name the draft of this model."
        )
    return found


def _check(name: str, fields: _DFlashFields, config: DecoderConfig, target_size: int) -> None:
    """Raise `ConfigError` for a draft of another model, or with layers of another kind."""
    if config.hidden_size != target_size:
        raise ConfigError(
            f"--draft-model-path: {name} has {config.hidden_size} values for a token, and the model"
            f" {target_size}; name the draft of this model."
        )
    own = fields.dflash_config
    windows = [part.shape.window for part in config.attending if part.shape.window is not None]
    has_windows = own.use_swa or bool(windows) or "sliding_attention" in fields.layer_types
    has_other_parts = own.attention_sink_bias or not own.use_aux_hidden_state
    is_causal = own.causal or bool(fields.is_causal)
    if has_windows or has_other_parts or is_causal or not fields.is_neox_style:
        raise ConfigError(
            f"--draft-model-path: {name} has layers with windows, or others than those of the first"
            " DFlash drafts, which do not run here; name another draft, or write ngram."
        )
