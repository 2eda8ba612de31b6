"""Weights of a transformers class that stay as they are stored, and stacks of experts' tensors.

Owns the match between the tensors of a quantized checkpoint and the modules of a class: projections
and tables that are replaced by ours, experts likewise, and the tensors that the class wants of all
experts at once. What cannot be kept is read as plain numbers by the class's own loading.

Shapes: E experts, F features of an expert, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.layers.block_layers import BlockDevice, block_places
from triptych.core.runtime.layers.held_experts import HeldExperts
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.whole import Reader, is_quantized, load_whole
from triptych.core.weights.encoding import WeightEncoding

_EXPERT_PARTS = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2"),
}
"""The names of an expert's projections in checkpoints that have a tensor for each."""
_TRANSPOSED = {"Llama4TextExperts"}
"""Classes of experts without transformers' interface, whose stacks are transposed."""
_WHOLE = ("kv_b_proj",)
"""Modules whose weight is read by other code of ours: it stays plain."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts of one layer: the module, and the tensors of each expert by part."""

    path: str
    module: Any
    weights: Mapping[str, tuple[str, ...]]
    biases: Mapping[str, tuple[str, ...]]

    @property
    def tensors(self) -> Iterator[str]:
        """The checkpoint's tensors."""
        for names in (*self.weights.values(), *self.biases.values()):
            yield from names

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the module's weights."""
        return ("gate_up_proj" if "gate" in self.weights else "up_proj", "down_proj")

    def shape_of(self, part: str) -> tuple[int, int]:
        """The numbers of rows and inputs of one expert's matrix."""
        inner, down = self.parameters
        shape = getattr(self.module, down if part == "down" else inner).shape[1:]
        num_rows, num_inputs = reversed(shape) if _is_transposed(self.module) else shape
        num_parts = 1 if part == "down" else len(self.weights) - 1
        return num_rows // num_parts, num_inputs

    def stacks(self) -> Iterator[tuple[str, Reader]]:
        """The tensors that the class wants, with a reader of each."""
        for end, parts in (("", self.weights), ("_bias", self.biases)):
            if parts:
                inner, down = self.parameters
                halves = [parts[part] for part in ("gate", "up") if part in parts]
                yield f"{self.path}.{inner}{end}", partial(self._read, halves)
                yield f"{self.path}.{down}{end}", partial(self._read, [parts["down"]])

    def _read(self, halves: list[tuple[str, ...]], checkpoint: Checkpoint) -> Tensor:
        stacks = [torch.stack([checkpoint.read(name) for name in names]) for names in halves]
        is_concatenated = getattr(self.module, "is_concatenated", True)
        whole = torch.cat(stacks, 1) if is_concatenated else torch.stack(stacks, 2).flatten(1, 2)
        return whole.mT if _is_transposed(self.module) and whole.dim() == 3 else whole


@dataclass(frozen=True, slots=True)
class ClassNames:
    """A checkpoint's tensors as a class of transformers reads them.

    `stored_of` has them by the names that the class has for them; tensors that it converts
    otherwise than by their names keep what the renaming makes. It makes others of those that are
    `converted`.
    """

    stored_of: Mapping[str, str]
    converted: frozenset[str]

    @classmethod
    def of(cls, model: Any, names: Collection[str]) -> Self:
        """Find them; `model` may be on the meta device."""
        mapping = get_model_conversion_mapping(model)
        renamings, converters = (
            _of_kind(mapping, kind) for kind in (WeightRenaming, WeightConverter)
        )
        weights, prefix = model.state_dict(), model.base_model_prefix
        stored_of, converted = {}, set()
        for name in names:
            renamed, _ = rename_source_key(name, renamings, [], prefix, weights)
            if renamed not in weights and name in weights:
                renamed = name
            stored_of[renamed] = name
            if converters and rename_source_key(name, renamings, converters)[1] is not None:
                converted.add(name)
        return cls(stored_of, frozenset(converted))


class KeptWeights:
    """The weights of `model` that `encoding` keeps; `model` may be on the meta device."""

    def __init__(self, model: Any, encoding: WeightEncoding, names: ClassNames) -> None:
        stored_of = names.stored_of
        stacks = list(_expert_stacks(model, stored_of))
        self._model = model
        self._held = [each for each in stacks if _is_kept(each, encoding)]
        held, own = self._held, names.converted
        self._stacks = [s for s in stacks if s in held or not own.issuperset(s.tensors)]
        kept = _without_shared(model, encoding, stored_of)
        self._places = [(place, stored_of[place.name]) for place in block_places(model, kept)]
        self._encoding = encoding

    @property
    def is_empty(self) -> bool:
        """Whether the class reads all tensors by itself."""
        return not self._places and not self._stacks

    @property
    def num_bytes(self) -> int:
        """The bytes in memory of what is kept."""
        places = sum(place.num_bytes for place, _ in self._places)
        return places + sum(self._stack_bytes(stack) for stack in self._held)

    def _stack_bytes(self, stack: ExpertStack) -> int:
        num_bytes = 0
        for part, names in stack.weights.items():
            num_rows, num_inputs = stack.shape_of(part)
            for name in names:
                form = self._encoding.format_of(name, num_inputs)
                assert form is not None
                num_bytes += num_rows * form.row_bytes(num_inputs)
        return num_bytes

    @property
    def num_values(self) -> int:
        """The values of these weights, which the class would hold as plain numbers."""
        places: int = sum(place.shape[0] * place.shape[1] for place, _ in self._places)
        stacks = ((s.module, name) for s in self._held for name in s.parameters)
        experts: int = sum(getattr(module, name).numel() for module, name in stacks)
        return places + experts

    def drop(self) -> None:
        """Remove the plain weights, so that they are neither allocated nor loaded."""
        for place, _ in self._places:
            place.drop()
            place.layer._is_hf_initialized = True  # type: ignore[assignment]
        for stack in self._held:
            for name in stack.parameters:
                stack.module._parameters[name] = None
            stack.module._is_hf_initialized = True

    def readers(self, checkpoint: Checkpoint) -> dict[str, Reader]:
        """The tensors that the class loads itself, with a reader of each."""
        own = {name for _, name in self._places}
        stacked = {name for stack in self._stacks for name in stack.tensors}
        readers: dict[str, Reader] = {
            name: partial(_read, name)
            for name in checkpoint.tensors
            if name not in own and name not in stacked
        }
        for stack in self._stacks:
            held = stack.parameters if stack in self._held else ()
            readers |= {
                name: read for name, read in stack.stacks() if name.rpartition(".")[2] not in held
            }
        return readers

    def put(self, checkpoint: Checkpoint, where: BlockDevice) -> None:
        """Replace the modules by ours over the checkpoint's weights, on the device."""
        for place, name in self._places:
            place.put(_held_weight(checkpoint, name, where), where)
        for stack in self._held:
            parts = [stack.weights[part] for part in ("gate", "up") if part in stack.weights]
            read = partial(_held_weight, checkpoint, where=where)
            inner = [[read(name) for name in names] for names in zip(*parts, strict=True)]
            down = [read(name) for name in stack.weights["down"]]
            parent, _, name = stack.path.rpartition(".")
            held = HeldExperts(stack.module, inner, down, where)
            setattr(self._model.get_submodule(parent), name, held)


def _of_kind(mapping: list[WeightTransform], kind: type) -> list[Any]:
    return [each for each in mapping if isinstance(each, kind)]


def _is_transposed(module: Any) -> bool:
    default = type(module).__name__ in _TRANSPOSED
    return bool(getattr(module, "is_transposed", default))


def _expert_stacks(model: nn.Module, stored_of: Mapping[str, str]) -> Iterator[ExpertStack]:
    """The modules of experts whose tensors the checkpoint has one by one."""
    for path, module in model.named_modules():
        has_interface = hasattr(module, "has_gate") and hasattr(module, "is_concatenated")
        if not has_interface and type(module).__name__ not in _TRANSPOSED:
            continue
        weights, biases = (
            _parts_of(path, int(module.num_experts), end, stored_of) for end in ("weight", "bias")
        )
        if {"up", "down"} <= weights.keys():
            yield ExpertStack(path, module, weights, biases)


def _parts_of(
    path: str, num_experts: int, end: str, stored_of: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The tensors of each part, of all experts in order; parts without all of them are absent."""
    found = {}
    for part, aliases in _EXPERT_PARTS.items():
        for alias in aliases:
            names = [f"{path}.{number}.{alias}.{end}" for number in range(num_experts)]
            if all(name in stored_of for name in names):
                found[part] = tuple(stored_of[name] for name in names)
    return found


def _is_kept(stack: ExpertStack, encoding: WeightEncoding) -> bool:
    """Whether all weights of a stack are stored in a form that is kept."""
    if not hasattr(stack.module, "has_gate"):
        return False
    names = [name for part in stack.weights.values() for name in part]
    return encoding.keeps_stored and all(name in encoding.stored for name in names)


def _without_shared(
    model: Any, encoding: WeightEncoding, stored_of: Mapping[str, str]
) -> WeightEncoding:
    """The encoding by the class's names, without weights that more than one module reads."""
    tied = model.all_tied_weights_keys
    shared = {*tied, *tied.values()}
    stored = {
        name: encoding.stored[source]
        for name, source in stored_of.items()
        if source in encoding.stored and name not in shared and name.split(".")[-2] not in _WHOLE
    }
    return replace(encoding, stored=stored)


def _read(name: str, checkpoint: Checkpoint) -> Tensor:
    return checkpoint.read(name)


def _held_weight(checkpoint: Checkpoint, name: str, where: BlockDevice) -> HeldWeight:
    stored = checkpoint.read_stored(name) if where.device.type == "cuda" else None
    packed = stored or checkpoint.read_packed(name)
    assert packed is not None, name
    return packed


def load_kept(
    kind: Any,
    sketch: Any,
    checkpoint: Checkpoint,
    encoding: WeightEncoding,
    where: BlockDevice,
    **given: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """As `load_whole`, on the device, with quantized weights kept as `encoding` says.

    `sketch` is a model of class `kind` on the meta device.
    """
    names = ClassNames.of(sketch, checkpoint.tensors)
    outline = KeptWeights(sketch, encoding, names)
    if outline.is_empty and not is_quantized(checkpoint):
        model, info = load_whole(kind, checkpoint, **given)
        return model.to(where.device), info
    found: list[KeptWeights] = []

    def drop(model: Any) -> None:
        kept = KeptWeights(model, encoding, names)
        kept.drop()
        found.append(kept)

    readers = outline.readers(checkpoint)
    model, info = load_whole(_with_setup(kind, drop), checkpoint, readers, **given)
    model.__class__ = kind
    model.to(where.device)
    found[0].put(checkpoint, where)
    return model, info


def _with_setup(kind: Any, setup: Callable[[Any], None]) -> Any:
    """The class, with `setup` called on a new model before its weights are loaded."""

    def init(self: Any, config: Any, *args: Any, **given: Any) -> None:
        kind.__init__(self, config, *args, **given)
        setup(self)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
