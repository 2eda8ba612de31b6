"""LoRA adapters of a decoder: which modules they may change, and their slots.

Owns the match between the modules of an adapter and the projections of a decoder, fused ones
included, and the memory that an adapter takes. `core.weights.peft` reads an adapter's header; the
products are those of `core.runtime.layers.adapters`.

Shapes: I inputs, O outputs, R rank, V vocabulary, C hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.projection_targets import ProjectionTarget
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.kernels.native.arguments import packed_shape
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.adapters import (
    AdapterRows,
    ModuleChange,
    NativeAdapters,
    StackedAdapters,
    VocabularyAdapters,
    VocabularyChange,
)
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.latent_attention import LatentAttention
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeMlp
from triptych.core.weights.peft import TextAdapter

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_KEY = re.compile(
    r"(?:(?:model|language_model|text_model|backbone)\.)*"
    rf"(layers\.\d+\..+|{_EMBEDDING}|{_HEAD})"
)
_UNNAMED = ".forget_gate."
"""A module of Kimi Linear's class that the names in its files leave out."""
MAX_RANK = 4096
"""The highest rank of a projection's change on a CPU, whose threads have low values on the stack.

That of a fused projection is the sum over its modules.
"""
MAX_GPU_RANK = 128
"""The highest rank of the operation that adds adapters on a GPU."""
Outputs = Sequence[tuple[int, slice]]
ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The room for adapters: how many at a time, of which rank and of which modules.

    A `max_rank` of 0 is no limit, and no `modules` are all; `stacked_rank` is the rank for which
    memory is taken where adapters are stacked.
    """

    num_slots: int
    max_rank: int = 0
    stacked_rank: int = 0
    modules: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class AdaptableModules:
    """The modules that adapters may change: the projections that have their outputs.

    `outputs` are, by projection and module, the first output and the rows of the module; `sizes`
    the numbers of outputs and inputs of modules. A `vocabulary` may be changed on a CPU.
    """

    outputs: Mapping[Linear, Mapping[str, Outputs]]
    sizes: Mapping[str, tuple[int, int]]
    vocabulary: tuple[int, int] | None

    @classmethod
    def of(cls, decoder: Decoder, *, has_vocabulary: bool) -> Self:
        """Find the modules of a decoder, which is not prepared yet."""
        adaptable = set(_adaptable(decoder))
        outputs: dict[Linear, dict[str, list[tuple[int, slice]]]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        for target in decoder_targets(decoder):
            if not isinstance(target, ProjectionTarget) or target.linear not in adaptable:
                continue
            module = _key_of(target.name.removesuffix(".weight"))
            place = (target.first, target.rows.slice)
            outputs.setdefault(target.linear, {}).setdefault(module, []).append(place)
            sizes[module] = (target.rows.total, target.linear.num_inputs)
        vocabulary = None
        if has_vocabulary:
            vocabulary = sizes[_HEAD] = (decoder.vocab_size, decoder.config.hidden_size)
            outputs[decoder.head] = {_HEAD: [(0, slice(0, decoder.vocab_size))]}
        return cls(outputs, sizes, vocabulary)

    def check(self, adapter: TextAdapter, room: AdapterRoom) -> None:
        """Raise `WeightsError` naming what an adapter changes that this model or room has not."""
        is_stacked = self.vocabulary is None
        most = room.stacked_rank if is_stacked else room.max_rank or MAX_RANK
        if adapter.max_rank > most:
            raise WeightsError(
                f"Its rank is {adapter.max_rank}; this server takes {most} (--max-lora-rank)."
            )
        _refuse_two_of_one(adapter.pairs)
        _refuse_two_of_one(adapter.saved)
        for module in (*adapter.pairs, *adapter.saved):
            last = module.rpartition(".")[2]
            if room.modules and "all" not in room.modules and last not in room.modules:
                raise WeightsError(
                    f"It changes {module}; --lora-target-modules allows"
                    f" {', '.join(sorted(room.modules))}."
                )
        for module, (down, up) in adapter.pairs.items():
            rank = adapter.tensors[down].shape[0]
            outputs, inputs = self._sizes_of(module, is_embedded=module in adapter.embedded)
            self._check_shape(adapter, down, (rank, inputs))
            self._check_shape(adapter, up, (outputs, rank))
        for module, name in adapter.saved.items():
            if _find_key(module) not in (_EMBEDDING, _HEAD) or self.vocabulary is None:
                raise WeightsError(
                    f"It holds a trained copy of {module}, which is not offered here; train LoRA"
                    " alone (modules_to_save)."
                )
            self._check_shape(adapter, name, self.vocabulary)
        if not is_stacked:
            self._check_fused(adapter)

    def _check_fused(self, adapter: TextAdapter) -> None:
        """Raise `WeightsError` if the change of a projection has a rank above `MAX_RANK`."""
        ranks = {
            _key_of(module): adapter.tensors[down].shape[0]
            for module, (down, _) in adapter.pairs.items()
        }
        for modules in self.outputs.values():
            rank = sum(ranks.get(module, 0) for module in modules)
            if rank > MAX_RANK:
                raise WeightsError(
                    f"The ranks of {', '.join(modules)} are {rank} together; {MAX_RANK} are"
                    " offered."
                )

    def _sizes_of(self, module: str, *, is_embedded: bool) -> tuple[int, int]:
        key = _find_key(module)
        if is_embedded and key == _EMBEDDING and self.vocabulary is not None:
            return self.vocabulary[1], self.vocabulary[0]
        if is_embedded or key not in self.sizes:
            reason = "which is no module of this model that adapters may change"
            if ".experts" in module:
                reason = "an expert; adapters of experts are not offered"
            elif key in (_EMBEDDING, _HEAD):
                reason = "which adapters change only with the CPU's native kernels"
            raise WeightsError(f"It changes {module}, {reason}.")
        return self.sizes[key]

    def _check_shape(self, adapter: TextAdapter, name: str, shape: tuple[int, ...]) -> None:
        found = adapter.tensors[name]
        if found.shape != shape:
            raise WeightsError(
                f"Tensor {name} has shape {list(found.shape)}, but the model needs {list(shape)}."
            )


class DecoderAdapters:
    """The adapters of one decoder, by slot. Made before the decoder is prepared."""

    def __init__(
        self,
        decoder: Decoder,
        modules: AdaptableModules,
        room: AdapterRoom,
        native: NativeKernels | None,
    ) -> None:
        self.rows = decoder.adapter_rows = AdapterRows()
        self.room, self.modules = room, modules
        self._dtype, self._device, self._native = decoder.dtype, decoder.head.device, native
        self._projections: dict[Linear, NativeAdapters | StackedAdapters] = {}
        self.vocabulary: VocabularyAdapters | None = None
        for linear, outputs in modules.outputs.items():
            made: NativeAdapters | StackedAdapters
            if native is not None:
                made = NativeAdapters(self.rows, room.num_slots, native)
            else:
                sizes = room.num_slots, room.stacked_rank
                made = StackedAdapters(self.rows, *sizes, outputs, linear)
            linear.adapters = self._projections[linear] = made
        if modules.vocabulary is not None:
            self.vocabulary = decoder.vocabulary_adapters = VocabularyAdapters(self.rows)

    def num_bytes(self, adapter: TextAdapter) -> int:
        """The bytes of an adapter that takes memory of its own; 0 where its room is taken."""
        if self._native is None:
            return 0
        num_values = 0
        for module in self._changed(adapter):
            rank, num_inputs = adapter.tensors[adapter.pairs[module][0]].shape
            if module in adapter.embedded:
                assert self.modules.vocabulary is not None
                num_values += rank * sum(self.modules.vocabulary)
                continue
            for outputs in self.modules.outputs.values():
                if (places := outputs.get(_key_of(module))) is not None:
                    num_values += rank * (num_inputs + sum(map(_length, places)))
        for module in adapter.saved:
            num_outputs, num_inputs = adapter.tensors[adapter.saved[module]].shape
            if _key_of(module) == _HEAD:
                num_outputs, num_inputs = packed_shape(num_outputs, num_inputs, self._dtype)
            num_values += num_outputs * num_inputs
        return num_values * self._dtype.itemsize

    def put(self, slot: int, adapter: TextAdapter, read: ReadTensor) -> None:
        """Fill a slot that no step in flight uses with a checked adapter."""
        changes = {
            change.module: change
            for module in self._changed(adapter)
            if module not in adapter.embedded
            for change in [self._change(adapter, module, read)]
        }
        for linear, outputs in self.modules.outputs.items():
            own = [
                ModuleChange(module, changes[module].down_RI, changes[module].up_OR, places)
                for module, places in outputs.items()
                if module in changes
            ]
            self._projections[linear].put(slot, own)
        if self.vocabulary is not None:
            self.vocabulary.put(slot, self._vocabulary_change(adapter, read))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def clear(self, slot: int) -> None:
        """Clear a slot that no step in flight uses."""
        for projection in self._projections.values():
            projection.put(slot, ())
        if self.vocabulary is not None:
            self.vocabulary.put(slot, None)

    def _change(self, adapter: TextAdapter, module: str, read: ReadTensor) -> ModuleChange:
        down_RI, up_OR = self._matrices(adapter, module, read)
        return ModuleChange(_key_of(module), down_RI, up_OR, ())

    def _changed(self, adapter: TextAdapter) -> list[str]:
        """The modules that its pairs change, except those of which it has the whole weights."""
        saved = set(map(_key_of, adapter.saved))
        return [module for module in adapter.pairs if _key_of(module) not in saved]

    def _matrices(
        self, adapter: TextAdapter, module: str, read: ReadTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices of a module, the second at full strength."""
        down, up = _at_full_strength(adapter, module, read)
        return down.to(self._device, self._dtype), up.to(self._device, self._dtype)

    def _vocabulary_change(self, adapter: TextAdapter, read: ReadTensor) -> VocabularyChange | None:
        whole = {_key_of(module): self._whole(adapter, module, read) for module in adapter.saved}
        head = down_VR = up_RC = None
        if _HEAD in whole:
            head = Linear.of(whole[_HEAD])
            head.prepare(self._native)
        for module in adapter.embedded if _EMBEDDING not in whole else ():
            down_RV, up_CR = self._matrices(adapter, module, read)
            # The clone of what may be a view of the mapped file, as one rank is contiguous.
            down_VR = down_RV.t().clone(memory_format=torch.contiguous_format)
            up_RC = up_CR.t().contiguous()
        if not whole and down_VR is None:
            return None
        return VocabularyChange(whole.get(_EMBEDDING), down_VR, up_RC, head)

    def _whole(self, adapter: TextAdapter, module: str, read: ReadTensor) -> torch.Tensor:
        """The whole weight of a module, with the adapter's change of it."""
        weight = read(adapter.saved[module]).float()
        for changed in adapter.pairs:
            if _key_of(changed) == _key_of(module):
                down, up = _at_full_strength(adapter, changed, read)
                change = up @ down.float()
                weight = weight + (change.t() if changed in adapter.embedded else change)
        return weight.to(self._dtype, copy=True)


def _at_full_strength(
    adapter: TextAdapter, module: str, read: ReadTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of a module as they are stored, the second multiplied by the strength."""
    down, up = map(read, adapter.pairs[module])
    strength = adapter.config.strength(module, len(down))
    return down, up.float() * (1.0 if strength is None else strength)


def stacked_bytes(modules: AdaptableModules, room: AdapterRoom, dtype: torch.dtype) -> int:
    """The bytes that all slots take where adapters are stacked."""
    num_values = sum(
        linear.num_inputs + sum(map(_length, places))
        for linear, outputs in modules.outputs.items()
        for places in outputs.values()
    )
    return room.num_slots * room.stacked_rank * num_values * dtype.itemsize


def _adaptable(decoder: Decoder) -> Iterator[Linear]:
    """The projections whose products adapters may change: all but those of mixtures."""
    for layer in decoder.layers:
        parts = [layer.attention, layer.mlp, layer.input_gate]
        plain = (part for part in parts if part is not None and not isinstance(part, MoeMlp))
        split = layer.attention.kv_up if isinstance(layer.attention, LatentAttention) else None
        for linear in chain.from_iterable(part.linears() for part in plain):
            if linear is not split:  # it becomes two matrices, and is no product of its own
                yield linear
    if decoder.layer_inputs is not None:
        yield from decoder.layer_inputs.linears()


def _refuse_two_of_one(modules: Iterable[str]) -> None:
    """Raise `WeightsError` if two names mean one module of a decoder."""
    seen: dict[str, str] = {}
    for module in modules:
        other = seen.setdefault(_key_of(module), module)
        if other != module:
            raise WeightsError(f"{other} and {module} are one module of this model.")


def _find_key(module: str) -> str:
    """The name of a module within its decoder, or an empty text."""
    found = _KEY.fullmatch(module)
    return found[1].replace(_UNNAMED, ".") if found else ""


def _key_of(module: str) -> str:
    return _find_key(module) or module


def _length(place: tuple[int, slice]) -> int:
    rows: slice = place[1]
    return int(rows.stop - rows.start)
