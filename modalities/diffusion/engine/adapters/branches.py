"""Low-rank branches beside a module's own output, for each row of a batch its own.

Owns the arithmetic, and the hooks that add it for the length of one run. Knows no file and no
request: the scales are arguments.

Legend: R rows, K parts of a row (what models fold into the batch), r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from triptych.core.devices.transfer import sent

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, slots=True)
class AdapterBranch:
    """One adapter's share of one layer: `[r, in]` and `[out, r]`, or kernels of those channels."""

    layer: Layer
    down: Tensor
    up: Tensor

    def __call__(self, inputs: Tensor, scales: Tensor) -> Tensor:
        """What is added to the layer's output for these inputs; `scales` are one, or one each."""
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
    """How strongly an adapter acts on the rows of a run: `scales`, float32, one of each of `rows`.

    Without `rows` there is one scale, for all alike.
    """

    scales: Tensor
    rows: Tensor | None
    num_rows: int

    def add(self, branch: AdapterBranch, inputs: Tensor, output: Tensor) -> Tensor:
        """The output with the branch's share added in place; nothing else refers to it yet.

        It is computed only of the rows that have one; on a CPU of one at a time, so that none
        differs in its last bits from what it is alone.
        """
        if self.rows is None:
            return output.add_(branch(inputs, self.scales))
        of_rows = inputs.unflatten(0, (self.num_rows, -1))
        if inputs.is_cpu:
            folded = output.unflatten(0, (self.num_rows, -1))
            for row, scale in zip(self.rows.tolist(), self.scales, strict=True):
                folded[row] += branch(of_rows[row], scale)
            return output
        chosen = of_rows[self.rows]
        num_parts = chosen.shape[1]
        added = branch(chosen.flatten(0, 1), self.scales.repeat_interleave(num_parts))
        folded = output.unflatten(0, (self.num_rows, num_parts))
        folded.index_add_(0, self.rows, added.unflatten(0, chosen.shape[:2]))
        return output


@contextmanager
def joined(shares: Sequence[tuple[Mapping[Layer, AdapterBranch], Share]]) -> Iterator[None]:
    """While inside, the layers' outputs have the shares of these adapters' branches in them."""
    with ExitStack() as stack:
        of_layer: dict[Layer, list[tuple[AdapterBranch, Share]]] = {}
        for branches, share in shares:
            for layer, branch in branches.items():
                of_layer.setdefault(layer, []).append((branch, share))
        for layer, parts in of_layer.items():
            stack.callback(layer.register_forward_hook(_hook(parts)).remove)
        yield


def share_of(scales: Sequence[float], device: torch.device) -> Share:
    """The share of an adapter that acts so strongly on each row; 0: not at all."""
    rows = [row for row, scale in enumerate(scales) if scale]
    is_alike = len(set(scales)) == 1
    chosen = scales[:1] if is_alike else [scales[row] for row in rows]
    return Share(
        scales=sent(torch.tensor(chosen, dtype=torch.float32), device),
        rows=None if is_alike else sent(torch.tensor(rows), device),
        num_rows=len(scales),
    )


def _hook(parts: Sequence[tuple[AdapterBranch, Share]]) -> Any:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for branch, share in parts:
            output = share.add(branch, inputs[0], output)
        return output

    return add
