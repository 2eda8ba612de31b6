"""Arguments of recurrent layers in native kernels: the structures of native/states.h, for ctypes.

Owns their layout, and the rows of a step in it. Calls nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

MAX_WIDTH, MAX_HEAD = 8, 256
"""Limits of the kernels: tokens of a convolution, and values of a head."""


class StateRowArguments(ctypes.Structure):
    """The structure `StateRows`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "slots", "cuts")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_cuts", "line_bytes")),
        ("num_threads", ctypes.c_int32),
    )


class ConvolutionArguments(ctypes.Structure):
    """The structure `Convolution`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "state")),
        ("num_channels", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "activates")),
    )


class DeltaRuleArguments(ctypes.Structure):
    """The structure `DeltaRule`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decay", "dt_bias", "norm", "state")),
        *((name, ctypes.c_int32) for name in ("num_key_heads", "num_value_heads")),
        *((name, ctypes.c_int32) for name in ("key_dim", "value_dim", "num_decays")),
        *((name, ctypes.c_int32) for name in ("low_rank", "has_sigmoid_gate")),
        *((name, ctypes.c_float) for name in ("eps", "beta_scale")),
    )


class ScanArguments(ctypes.Structure):
    """The structure `Scan`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decay", "dt_bias", "skip", "norm", "state")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_groups")),
        *((name, ctypes.c_int32) for name in ("head_dim", "state_dim")),
        *((name, ctypes.c_float) for name in ("eps", "least", "most")),
        *((name, ctypes.c_float) for name in ("gate_scale", "step_scale")),
        ("has_norm", ctypes.c_int32),
    )


class RecurrentArguments(ctypes.Structure):
    """The structure `Recurrent`."""

    _fields_ = (
        ("convolution", ConvolutionArguments),
        ("delta", DeltaRuleArguments),
        ("scan", ScanArguments),
        *((name, ctypes.c_int64) for name in ("in_width", "out_width")),
        *((name, ctypes.c_int32) for name in ("kind", "dtype")),
    )


class NativeStateRows:
    """The rows of a step of these lengths, whose states begin and end in `slots`.

    `cuts` are a row, a number of its tokens and a line each.
    """

    __slots__ = ("_tensors", "arguments")

    def __init__(
        self,
        lengths: Sequence[int],
        slots: Sequence[int],
        cuts: Sequence[tuple[int, int, int]],
        line_bytes: int,
    ) -> None:
        starts = [0, *accumulate(lengths)]
        flat_cuts = [number for cut in cuts for number in cut]
        self._tensors = [
            torch.tensor(each, dtype=torch.int64) for each in (starts, slots, flat_cuts)
        ]
        self.arguments = StateRowArguments(
            *(tensor.data_ptr() for tensor in self._tensors),
            len(lengths),
            len(cuts),
            line_bytes,
            torch.get_num_threads(),
        )
