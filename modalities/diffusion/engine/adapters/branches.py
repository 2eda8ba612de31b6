"""The low-rank branches of LoRA adapters, added to layer outputs with a scale per row of a batch.

Owns the product of a branch, for `nn.Linear` and `nn.Conv2d`, and the forward hooks that add it
while `apply_branches` is open. On a GPU the branches of one linear layer and rank are stacked: one
operation adds them where every row uses at most one of them. A CPU adds row by row, so that
batching does not change the last bits. Knows no file, no adapter name and no request: layers,
factors and scales are arguments.

Legend: L adapters of a stack, r rank, T positions of all rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from triptych.core.runtime.devices.transfer import to_device

Layer = nn.Linear | nn.Conv2d
_MAX_RANK = 128
"""The largest rank that the stacked operation supports."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStack:
    """The branches of several adapters of one linear layer: `[L, r, in]` and `[L, out, r]`."""

    down: Tensor
    up: Tensor

    def add(self, inputs: Tensor, output: Tensor, rows: _RowAdapters) -> None:
        """Add each row's branch in one operation, which needs a GPU."""
        from triptych.core.runtime.kernels.triton.lora import lora_add

        x_TI, y_TO = inputs.flatten(0, -2).to(self.down.dtype), output.view(-1, output.shape[-1])
        num_parts = len(x_TI) // len(rows.adapters)
        scales_T, adapters_T = (
            each.repeat_interleave(num_parts) for each in (rows.scales, rows.adapters)
        )
        lora_add(y_TO, x_TI, self.down, self.up, scales_T, adapters_T)


@dataclass(frozen=True, slots=True)
class _RowAdapters:
    """For each row of a run its index in a stack, or -1, in int32, and a scale in float32."""

    adapters: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class AdapterBranch:
    """One adapter's branch of one layer: `[r, in]` and `[out, r]`, or kernels of those channels.

    Both may be views of a `stack`, at index `place`.
    """

    layer: Layer
    down: Tensor
    up: Tensor
    stack: AdapterStack | None = None
    place: int = -1

    def __call__(self, inputs: Tensor, scales: Tensor) -> Tensor:
        """The branch's output for these inputs; `scales` is one number, or one per input row."""
        inputs = inputs.to(self.down.dtype)
        scales = scales.view(-1, *[1] * (inputs.ndim - 1))
        if isinstance(self.layer, nn.Linear):
            return linear((linear(inputs, self.down) * scales).to(inputs.dtype), self.up)
        padding: Any = self.layer.padding
        stride, dilation = self.layer.stride, self.layer.dilation
        narrow = conv2d(inputs, self.down, None, stride, padding, dilation)
        return conv2d((narrow * scales).to(inputs.dtype), self.up)


@dataclass(frozen=True, slots=True)
class Share:
    """An adapter's scales on the rows of a run: `scales`, float32, one for each of `rows`.

    Without `rows` a single scale applies to all. `of_rows` holds all rows' scales on the host.
    """

    scales: Tensor
    rows: Tensor | None
    of_rows: Sequence[float]

    @property
    def num_rows(self) -> int:
        """The number of rows of the run."""
        return len(self.of_rows)

    def add(self, branch: AdapterBranch, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the branch to the output in place; no other reference to it exists yet.

        Computed only for rows with a scale; on a CPU one row at a time, so that batching does not
        change the last bits.
        """
        if self.rows is None:
            return output.add_(branch(inputs, self.scales))
        split = inputs.unflatten(0, (self.num_rows, -1))
        if inputs.is_cpu:
            folded = output.unflatten(0, (self.num_rows, -1))
            for row, scale in zip(self.rows.tolist(), self.scales, strict=True):
                folded[row] += branch(split[row], scale)
            return output
        chosen = split[self.rows]
        num_parts = chosen.shape[1]
        added = branch(chosen.flatten(0, 1), self.scales.repeat_interleave(num_parts))
        folded = output.unflatten(0, (self.num_rows, num_parts))
        folded.index_add_(0, self.rows, added.unflatten(0, chosen.shape[:2]))
        return output


_Part: TypeAlias = tuple[AdapterBranch, Share]


@contextmanager
def apply_branches(shares: Sequence[tuple[Mapping[Layer, AdapterBranch], Share]]) -> Iterator[None]:
    """A context in which these adapters' branches are added to the layers' outputs."""
    with ExitStack() as stack:
        of_layer: dict[Layer, list[tuple[AdapterBranch, Share]]] = {}
        for branches, share in shares:
            for layer, branch in branches.items():
                of_layer.setdefault(layer, []).append((branch, share))
        sent_rows: dict[object, _RowAdapters] = {}
        for layer, parts in of_layer.items():
            together, rest = _stacked_parts(parts, sent_rows)
            stack.callback(layer.register_forward_hook(_hook(together, rest)).remove)
        yield


def stack_branches(branches: Sequence[AdapterBranch]) -> list[AdapterBranch]:
    """Stack the branches of one layer by rank; the results are views of the stacks.

    Convolutions, high ranks and branches off the GPU stay unchanged.
    """
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for index, branch in enumerate(branches):
        rank = len(branch.down)
        if isinstance(branch.layer, nn.Linear) and branch.down.is_cuda and rank <= _MAX_RANK:
            by_rank[rank].append(index)
    found = list(branches)
    for indexes in by_rank.values():
        down = torch.stack([branches[index].down for index in indexes])
        both = AdapterStack(down, torch.stack([branches[index].up for index in indexes]))
        for place, index in enumerate(indexes):
            layer = branches[index].layer
            found[index] = AdapterBranch(layer, down[place], both.up[place], both, place)
    return found


def make_share(scales: Sequence[float], device: torch.device) -> Share:
    """The `Share` of an adapter with these scales per row; 0: no effect."""
    rows = [row for row, scale in enumerate(scales) if scale]
    is_alike = len(set(scales)) == 1
    chosen = scales[:1] if is_alike else [scales[row] for row in rows]
    return Share(
        scales=to_device(torch.tensor(chosen, dtype=torch.float32), device),
        rows=None if is_alike else to_device(torch.tensor(rows), device),
        of_rows=tuple(scales),
    )


def _stacked_parts(
    parts: Sequence[_Part], sent_rows: dict[object, _RowAdapters]
) -> tuple[list[tuple[AdapterStack, _RowAdapters]], list[_Part]]:
    """Split parts into stacked operations, one adapter per row each, and other parts.

    Parts that act equally on all rows stay plain torch products. `sent_rows` caches row tensors
    already on the device.
    """
    rounds: list[tuple[AdapterStack, list[_Part]]] = []
    rest = []
    for part in parts:
        branch, share = part
        if branch.stack is None or share.rows is None:
            rest.append(part)
            continue
        for stack, others in rounds:
            if stack is branch.stack and not any(_overlaps(share, each) for _, each in others):
                others.append(part)
                break
        else:
            rounds.append((branch.stack, [part]))
    return [(stack, _rows_of(others, sent_rows)) for stack, others in rounds], rest


def _overlaps(first: Share, second: Share) -> bool:
    return any(a and b for a, b in zip(first.of_rows, second.of_rows, strict=True))


def _rows_of(parts: Sequence[_Part], sent_rows: dict[object, _RowAdapters]) -> _RowAdapters:
    places, scales = [-1] * parts[0][1].num_rows, [0.0] * parts[0][1].num_rows
    for branch, share in parts:
        for row, scale in enumerate(share.of_rows):
            if scale:
                places[row], scales[row] = branch.place, scale
    key = (tuple(places), tuple(scales))
    if key not in sent_rows:
        device = parts[0][0].down.device
        sent_rows[key] = _RowAdapters(
            to_device(torch.tensor(places, dtype=torch.int32), device),
            to_device(torch.tensor(scales, dtype=torch.float32), device),
        )
    return sent_rows[key]


def _hook(together: Sequence[tuple[AdapterStack, _RowAdapters]], parts: Sequence[_Part]) -> Any:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for stack, rows in together:
            stack.add(inputs[0], output, rows)
        for branch, share in parts:
            output = share.add(branch, inputs[0], output)
        return output

    return add
