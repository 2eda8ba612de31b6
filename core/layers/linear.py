"""Linear projection, on a CPU packed for the native kernels.

Owns one weight and its bias. Several projections of one input are one `Linear` whose rows lie one
after the other; loaders fill them through views (`rows`). Knows nothing of what it projects.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from triptych.core.devices.device import has_fast_cpu_bfloat16
from triptych.core.kernels.native.library import NativeKernels

_META = torch.device("meta")


class Linear:
    """`y_TO = x_TI @ weight_OI.T + bias_O (+ residual_TO)`.

    On a CPU, `prepare` reorders the weight: into the layout of our kernels, or, where there are
    none, of oneDNN's in bfloat16. Both add the residual in float32. With our kernels a row's result
    does not depend on the others.
    """

    __slots__ = ("_native", "_num_outputs", "bias_O", "packed", "weight_OI")

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight_OI = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias_O = torch.empty(num_outputs, dtype=dtype, device=device) if has_bias else None
        self.packed: torch.Tensor | None = None
        self._native: NativeKernels | None = None
        self._num_outputs = num_outputs

    @classmethod
    def of(cls, weight_OI: torch.Tensor) -> Linear:
        """A projection without bias over a weight that is there already."""
        num_outputs, num_inputs = weight_OI.shape
        linear = cls(num_inputs, num_outputs, has_bias=False, dtype=weight_OI.dtype, device=_META)
        linear.weight_OI = weight_OI
        return linear

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Pack the loaded weight; the plain copy is dropped unless it is shared.

        A shared projection may be prepared again.
        """
        if self.packed is not None:
            return
        weight = self.weight_OI
        if native is not None and native.can_pack(weight):
            self._native, self.packed = native, native.pack(weight)
        elif is_packable(weight.dtype, weight.device):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            return
        self.weight_OI = weight.new_empty(0)

    @property
    def is_native(self) -> bool:
        """Whether the weight is packed for our kernels."""
        return self._native is not None

    def __call__(
        self,
        x_TI: torch.Tensor,
        residual_TO: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Project, adding `residual_TO` where given. `x_TI` is contiguous.

        With `out_dtype`, sums become that type without having been rounded to the weight's, where
        the kernels are ours.
        """
        if self._native is not None and self.packed is not None:
            return self._native.linear(
                x_TI, self.packed, self._num_outputs, self.bias_O, residual_TO, out_dtype
            )
        y_TO = self._call_torch(x_TI, residual_TO)
        return y_TO if out_dtype is None else y_TO.to(out_dtype)

    def _call_torch(self, x_TI: torch.Tensor, residual_TO: torch.Tensor | None) -> torch.Tensor:
        if self.packed is not None:
            return self._call_packed(x_TI, self.packed, residual_TO)
        if residual_TO is None:
            return linear(x_TI, self.weight_OI, self.bias_O)
        y_TO = torch.addmm(residual_TO, x_TI, self.weight_OI.t())
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    def _call_packed(
        self, x_TI: torch.Tensor, packed: torch.Tensor, residual_TO: torch.Tensor | None
    ) -> torch.Tensor:
        pointwise = torch.ops.mkldnn._linear_pointwise
        if residual_TO is None:
            y_TO = pointwise.default(x_TI, packed, self.bias_O, "none", [], "")
        else:
            y_TO = pointwise.binary(x_TI, residual_TO, packed, self.bias_O, "add")
        assert isinstance(y_TO, torch.Tensor)
        return y_TO


def is_packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type on this device."""
    return device.type == "cpu" and dtype is torch.bfloat16 and has_fast_cpu_bfloat16()
