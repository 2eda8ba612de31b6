"""The linear layers of other libraries' models on our projection kernel.

Owns the stand-in for `torch.nn.Linear`, and the walk that puts it in place of those it may. Torch's
own results depend on the number of rows, on some processors for any of them and on all for a single
one; those of our kernel never do. Knows no model.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor, nn

from triptych.core.kernels.native.library import NativeKernels

_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that hand the weights of the layers in them to a kernel of torch's."""


class NativeLinear(nn.Linear):
    """What `linear` computes, in inference alone. Only its packed weight stays in memory.

    `weight` keeps type, shape and device, but takes no memory and holds NaN, so that computing with
    it shows.
    """

    def __init__(self, linear: nn.Linear, native: NativeKernels) -> None:
        nn.Module.__init__(self)  # not `Linear`'s, which would allocate
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_OI = linear.weight.detach()
        self._native, self._packed, self._dtype = native, native.pack(weight_OI), weight_OI.dtype
        nothing = weight_OI.new_full((), torch.nan).expand_as(weight_OI)
        self.weight = nn.Parameter(nothing, requires_grad=False)
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - `Linear`'s own name for it
        """As `Linear` does. Raises `RuntimeError` for another type than the weight's."""
        if input.dtype is not self._dtype:
            raise RuntimeError(f"linear: {input.dtype} times weights of {self._dtype}")
        x_TI = input.reshape(-1, self.in_features).contiguous()
        y_TO = self._native.linear(x_TI, self._packed, self.bias)
        return y_TO.view(*input.shape[:-1], self.out_features)


def pack_linears(module: nn.Module, native: NativeKernels | None) -> None:
    """Put `NativeLinear`s in place of the linear layers inside a loaded module, one by one.

    Layers stay as they are whose weights the kernels do not take, or other modules read: tied
    embeddings, fused layers of torch's, and whatever is more than a plain `Linear`.
    """
    if native is None:
        return
    num_users = Counter(
        parameter.data_ptr()
        for user in module.modules()
        for parameter in user._parameters.values()
        if parameter is not None
    )
    places: defaultdict[nn.Linear, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in module.modules():
        for name, child in parent._modules.items():
            if _is_plain(child) and not isinstance(parent, _READS_WEIGHTS):
                assert isinstance(child, nn.Linear)
                if num_users[child.weight.data_ptr()] == 1 and _takes(native, child):
                    places[child].append((parent, name))
    while places:
        linear, users = places.popitem()
        packed = NativeLinear(linear, native)
        for parent, name in users:
            setattr(parent, name, packed)


def _is_plain(module: nn.Module | None) -> bool:
    """Whether it is a `Linear` and no more: no subclass, no weight made at each call."""
    return (
        type(module) is nn.Linear
        and "weight" in module._parameters
        and "forward" not in vars(module)
        and not module._forward_pre_hooks
        and not module._forward_hooks
    )


def _takes(native: NativeKernels, linear: nn.Linear) -> bool:
    weight, bias = linear.weight, linear.bias
    has_like_bias = bias is None or (bias.dtype is weight.dtype and bias.is_contiguous())
    return has_like_bias and native.can_pack(weight)
