"""A model on the native decoder: its needs in memory, and its construction.

Owns the interface that a loader uses before and while a model is built (`Blueprint`), and the steps
from a checkpoint to a `Decoder` that is ready to run. Knows nothing of ledgers, pages or
schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from triptych.core.errors import ConfigError
from triptych.core.runtime.decoders.adapters import (
    AdaptableModules,
    AdapterRoom,
    DecoderAdapters,
    stacked_bytes,
)
from triptych.core.runtime.decoders.causal_model import CausalModel, logits_bytes
from triptych.core.runtime.decoders.division import divide
from triptych.core.runtime.decoders.expert_names import names_of
from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.host_plan import HostPlan, after_each_layer
from triptych.core.runtime.decoders.layer_names import LAYER_NAMES
from triptych.core.runtime.decoders.projection_targets import AS_STORED, ProjectionTarget
from triptych.core.runtime.decoders.shared_packing import SharedPacking
from triptych.core.runtime.decoders.tensor_names import (
    BARE,
    WHOLE,
    DecoderTensors,
    decoder_targets,
    embedding_target,
    is_surplus,
    is_unused,
)
from triptych.core.runtime.kernels.key_index import MAX_SCORES
from triptych.core.runtime.kernels.native.arguments import DTYPES
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.host_layers import HostLayers
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.linear import is_packable
from triptych.core.runtime.layers.mixers import parts_of
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.runtime.layers.shards import BLOCK_UNIT, PLAIN_UNIT
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, load_tensors
from triptych.core.runtime.tensors.renamed import renamed
from triptych.core.runtime.tensors.stacked import split_experts
from triptych.core.weights.encoding import WeightEncoding

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_ANY_ROPE = RopeConfig(num_rotated_dims=2, max_length=1, trained_length=1)
_AMONG_OTHERS = "model.language_model."
"""The beginning of the names of a decoder's tensors in a model of more than text."""


class Blueprint(Protocol):
    """A model that is known but not yet loaded."""

    max_length: int
    vocab_size: int
    dtype: torch.dtype

    def weight_bytes(self) -> int:
        """Device bytes of the weights once loaded."""

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that one step holds in addition to weights and cache."""

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> CausalModel:
        """Load the weights. Raises `WeightsError` naming tensor and file."""


class NativeBlueprint:
    """Implements `Blueprint` with `core.runtime.layers.decoder`.

    If `is_deterministic` is set before `build`, rows do not depend on their batch on a GPU. With an
    `adapter_room` the decoder takes `adapters`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
        encoding: WeightEncoding = AS_STORED,
    ) -> None:
        self.config = read_decoder_config(config, max_length=max_length)
        self.max_length = self.config.rope.max_length
        self.vocab_size = self.config.vocab_size
        self._largest = self.config
        self.dtype = dtype
        self.device = device
        self._native = native
        self.encoding = encoding
        self._group: RankGroup | None = None
        self.is_deterministic = False
        self.packing: SharedPacking | None = None
        """Where packed weights are shared with other processes; set before `build`."""
        self.host_plan: HostPlan | None = None
        self.adapter_room: AdapterRoom | None = None
        self.adapters: DecoderAdapters | None = None

    def join(self, group: RankGroup, *, by_experts: bool = False) -> None:
        """Make this the blueprint of this rank's part; call `check_divisible` first.

        With `by_experts` a rank has whole experts of a mixture, not a part of each. Sizes are
        those of the largest part of any rank: if they fit here, every part fits its rank.
        """
        parts = self._parts(group.num_ranks, by_experts=by_experts)
        layers = zip(*(part.attending for part in parts), strict=True)
        widest = tuple(max(layer, key=lambda part: part.num_heads) for layer in layers)
        self._largest = replace(parts[0], attention=widest)  # it has the most of all else
        self.config = parts[group.rank]
        self._group = group

    def check_divisible(self, num_ranks: int, *, by_experts: bool = False) -> None:
        """Raise `ConfigError` for a model that cannot be divided by `num_ranks`."""
        parts = self._parts(num_ranks, by_experts=by_experts)
        for part in parts if self.encoding.has_blocks else ():
            sketch = Decoder(part, dtype=self.dtype, device=torch.device("meta"))
            for target in decoder_targets(sketch, encoding=self.encoding):
                if isinstance(target, ProjectionTarget):
                    target.check_blocks()

    def _parts(self, num_ranks: int, *, by_experts: bool) -> list[DecoderConfig]:
        unit = BLOCK_UNIT if self.encoding.has_blocks else PLAIN_UNIT
        return [
            divide(self.config, rank, num_ranks, by_experts=by_experts, unit=unit)
            for rank in range(num_ranks)
        ]

    def weight_bytes(self) -> int:
        """Bytes of the parameters; a plain tied embedding counts twice if torch packs the head."""
        sketch = Decoder(self._largest, dtype=self.dtype, device=torch.device("meta"))
        embedding = embedding_target(sketch, encoding=self.encoding)
        targets: list[Target] = list(decoder_targets(sketch, encoding=self.encoding))
        is_packed = self._kernels is None and is_packable(self.dtype, self.device)
        if self._largest.has_tied_embeddings and is_packed and embedding.format is None:
            targets.append(embedding)
        saved_bytes = 0 if self.host_plan is None else self.host_plan.saved_bytes
        return sum(target.num_bytes(self.dtype.itemsize) for target in targets) - saved_bytes

    def leave_on_host(self, num_bytes: int) -> HostPlan:
        """Plan so many bytes of the last layers' weights in host memory, for a GPU.

        Raises `ConfigError` where that is not offered.
        """
        kinds = {type(part) for layer in self.config.attention for part in parts_of(layer)}
        if LatentConfig in kinds:
            raise ConfigError(
                "--cpu-offload-gb: layers with latent attention stay on the device; leave it out."
            )
        sketch = Decoder(self.config, dtype=self.dtype, device=torch.device("meta"))
        targets = decoder_targets(sketch, encoding=self.encoding)
        self.host_plan = HostPlan.of(targets, num_bytes, self.dtype.itemsize)
        return self.host_plan

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that a step of such a size holds in addition to weights and cache."""
        values = num_tokens * position_values(self._largest)
        if self.device.type == "cpu" and self._native is None:
            values += gathered_values(self._largest, num_tokens, num_rows)
        layers = values * self.dtype.itemsize + score_bytes(self._largest, num_tokens)
        sampling = num_tokens * self._largest.hidden_size * self.dtype.itemsize
        sampling += logits_bytes(num_rows, self.vocab_size)
        return max(layers, sampling)

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        return self.config.kv_layout(page_size, dtype)

    @property
    def adaptable(self) -> AdaptableModules:
        """The modules that adapters may change, before the model is built."""
        return self._adaptable(Decoder(self.config, dtype=self.dtype, device=torch.device("meta")))

    @property
    def stacked_bytes(self) -> int:
        """The bytes of the room for adapters, where they take none of their own."""
        if self.adapter_room is None or self._kernels is not None:
            return 0
        return stacked_bytes(self.adaptable, self.adapter_room, self.dtype)

    @property
    def _kernels(self) -> NativeKernels | None:
        return self._native if self.dtype in DTYPES else None

    def _adaptable(self, decoder: Decoder) -> AdaptableModules:
        return AdaptableModules.of(decoder, has_vocabulary=self._kernels is not None)

    def build(
        self,
        checkpoint: Checkpoint,
        report: Callable[[float], None],
        part: DecoderTensors | None = None,
    ) -> Decoder:
        """Allocate, stream the weights into place and pack them.

        `part` selects the decoder in a checkpoint that holds more; the rest is not read. It is
        found where the names say that there is more.
        """
        checkpoint = split_experts(checkpoint, names_of(self.config.moe).stacked)
        checkpoint = renamed(checkpoint, LAYER_NAMES[self.config.naming].stored)
        decoder = Decoder(self.config, dtype=self.dtype, device=self.device, group=self._group)
        for linear in decoder.linears():
            linear.is_deterministic = self.is_deterministic and self.device.type == "cuda"
        if self.adapter_room is not None:
            modules, kernels = self._adaptable(decoder), self._kernels
            self.adapters = DecoderAdapters(decoder, modules, self.adapter_room, kernels)
        names = checkpoint.tensors
        if part is None and any(name.startswith(_AMONG_OTHERS) for name in names):
            part = DecoderTensors.find(names)
        is_bare = embedding_target(decoder).name not in names
        with self._shared_packing(decoder, part):
            load_tensors(
                checkpoint,
                self._targets(decoder, part or (BARE if is_bare else WHOLE)),
                ignored=lambda name: (
                    is_unused(name)
                    or is_surplus(name, self.config)
                    or (part is not None and not part.holds(name))
                ),
                report=report,
            )
            decoder.prepare(self._native)
        if self.packing is None:
            decoder.keep_own_rows()
        return decoder

    def _targets(self, decoder: Decoder, part: DecoderTensors) -> Iterator[Target]:
        """The decoder's destinations; layers that stay in host memory go there when loaded."""
        targets = decoder_targets(decoder, part, self.encoding)
        if self.host_plan is None:
            return targets
        first = self.host_plan.first
        decoder.host_layers = host = HostLayers(first, self.device)
        return after_each_layer(targets, first, lambda layer: host.take(decoder.layers[layer]))

    def _shared_packing(
        self, decoder: Decoder, part: DecoderTensors | None
    ) -> AbstractContextManager[None]:
        """The context in which the decoder is loaded."""
        if self.packing is None:
            return nullcontext()
        sizes = replace(self.config, rope=_ANY_ROPE, local_rope=None)  # whatever the context
        details = repr((sizes, self.dtype, self.encoding.wanted, part))
        return self.packing.of(list(decoder.linears()), details)


def position_values(config: DecoderConfig) -> int:
    """The most values that layers hold for each position in addition to weights and cache."""
    attention = max(part.position_values for part in config.parts())
    widest = max(3 * config.intermediate_size, attention)
    if (moe := config.moe) is not None:  # inputs and outputs of a token's experts
        of_expert = 3 * moe.intermediate_size + 3 * config.hidden_size
        of_shared = 3 * moe.shared_size + 2 * config.hidden_size
        widest = max(widest, moe.routing.num_chosen * of_expert + of_shared)
    if (inputs := config.layer_inputs) is not None:
        widest += 3 * inputs.num_layers * inputs.size
    if (altup := config.altup) is not None:  # streams, some of them in float32
        widest += 6 * altup.num_streams * config.hidden_size
    return 4 * config.hidden_size + widest


def score_bytes(config: DecoderConfig, num_tokens: int) -> int:
    """Bytes of the scores of an index of keys, of which a part is held at a time."""
    if config.key_index is None:
        return 0
    return 4 * min(num_tokens * config.rope.max_length, MAX_SCORES)


def gathered_values(config: DecoderConfig, num_tokens: int, num_rows: int) -> int:
    """Values that attention by torch holds: masks of prompts, and gathered keys and values.

    Rows of similar length are padded to the longest, which is less than twice their own.
    """
    gathered = num_rows * max(layer.gathered_values for layer in config.attending)
    return (num_tokens + gathered) * config.rope.max_length
