"""A layer's maps between residual streams in the native step: addresses, and tensors made for it.

Owns the structure `AltUp`. The order of the step is in core/runtime/kernels/native/altup.c.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.native.arguments import AltUpPointers
from triptych.core.runtime.layers.altup import AltUp
from triptych.core.runtime.layers.native_attention import norm_pointers, projection_pointers


class NativeAltUp:
    """The structure of a prepared layer, with small weights as float32; it lives no longer."""

    def __init__(self, altup: AltUp) -> None:
        assert altup.router is not None
        small = (
            altup.router.weight_NC,
            altup.predict_SN.float(),
            altup.correct_NN.float(),
            altup.scale_C.float(),
        )
        self._small: tuple[torch.Tensor, ...] = tuple(each.contiguous() for each in small)
        router, predict, correct, scale = (each.data_ptr() for each in self._small)
        laurel = altup.laurel
        self.pointers = AltUpPointers(
            laurel_left=projection_pointers(laurel.left),
            laurel_right=projection_pointers(laurel.right),
            laurel_norm=norm_pointers(laurel.norm),
            router=router,
            predict=predict,
            correct=correct,
            scale=scale,
            laurel_rank=altup.config.laurel_rank,
        )
