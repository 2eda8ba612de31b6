"""The functions of the native library: their results and arguments, for ctypes.

Owns the table. Loads nothing.
"""

from __future__ import annotations

import ctypes

from triptych.core.runtime.kernels.native.adapter_arguments import (
    AdaptedRowPointers,
    LowRankPointers,
)
from triptych.core.runtime.kernels.native.arguments import (
    AttentionArguments,
    ChoiceArguments,
    LinearArguments,
    MixArguments,
    MixturePointers,
    SampleArguments,
    SnakeArguments,
    StepArguments,
)
from triptych.core.runtime.kernels.native.state_arguments import (
    RecurrentArguments,
    StateRowArguments,
)

FUNCTIONS = {
    "add_low_rank": (
        None,
        ctypes.POINTER(LinearArguments),
        ctypes.POINTER(LowRankPointers),
        ctypes.POINTER(AdaptedRowPointers),
    ),
    "choose_keys": (None, ctypes.POINTER(AttentionArguments), ctypes.POINTER(ChoiceArguments)),
    "decoder_step": (ctypes.c_int, ctypes.POINTER(StepArguments)),
    "sample_rows": (ctypes.c_int, ctypes.POINTER(SampleArguments)),
    "linear": (None, ctypes.POINTER(LinearArguments)),
    "linears": (None, ctypes.POINTER(LinearArguments), ctypes.c_int64),
    "mix": (None, ctypes.POINTER(MixArguments)),
    "mixture_bytes": (
        ctypes.c_int64,
        ctypes.POINTER(MixturePointers),
        *(ctypes.c_int64,) * 2,  # num_tokens, hidden
        ctypes.c_int32,  # dtype
    ),
    "pack_blocks": (
        None,
        ctypes.c_void_p,  # rows
        *(ctypes.c_int64,) * 2,  # num_outputs, num_inputs
        ctypes.c_int32,  # format
        ctypes.c_void_p,  # packed
        ctypes.c_int32,  # num_threads
    ),
    "pack_weight": (
        None,
        ctypes.c_void_p,  # weight
        *(ctypes.c_int64,) * 2,  # num_outputs, num_inputs
        ctypes.c_int32,  # dtype
        ctypes.c_void_p,  # packed
        ctypes.c_int32,  # num_threads
    ),
    # num_outputs, num_inputs, format
    "packed_block_bytes": (ctypes.c_int64, *(ctypes.c_int64,) * 2, ctypes.c_int32),
    "paged_attention": (ctypes.c_int, ctypes.POINTER(AttentionArguments)),
    "quantized_bytes": (ctypes.c_int64, ctypes.c_int64),  # num_inputs
    "read_packed_rows": (
        None,
        ctypes.c_void_p,  # packed
        ctypes.c_int64,  # num_inputs
        ctypes.c_int32,  # dtype
        ctypes.c_void_p,  # ids
        ctypes.c_int64,  # num_rows
        ctypes.c_void_p,  # rows
        ctypes.c_int32,  # num_threads
    ),
    "read_rows": (
        None,
        ctypes.c_void_p,  # packed
        ctypes.c_int64,  # num_inputs
        ctypes.c_int32,  # format
        ctypes.c_void_p,  # ids
        ctypes.c_int64,  # num_rows
        ctypes.c_void_p,  # rows
        *(ctypes.c_int32,) * 2,  # dtype, num_threads
    ),
    "recur": (
        None,
        ctypes.POINTER(RecurrentArguments),
        ctypes.POINTER(StateRowArguments),
        *(ctypes.c_void_p,) * 2,  # in, out
    ),
    "snake": (None, ctypes.POINTER(SnakeArguments)),
    "unpack_blocks": (
        None,
        ctypes.c_void_p,  # blocks
        *(ctypes.c_int64,) * 2,  # num_outputs, num_inputs
        ctypes.c_int32,  # format
        ctypes.c_void_p,  # values
        *(ctypes.c_int32,) * 2,  # dtype, num_threads
    ),
    # slots, k, v
    "write_pages": (None, ctypes.POINTER(AttentionArguments), *(ctypes.c_void_p,) * 3),
}
"""Result and argument types of the library's functions."""
