"""The native CPU kernels as Python calls: tensors in, tensors out.

Owns the loaded library and the layout of its arguments. Which step uses it is decided by who made
the step's `AttentionBatch`. Every call releases the GIL, uses torch's own OpenMP runtime (already
loaded, under the same name) and as many threads as torch.

Shapes: see `core.kernels.paged_attention`.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from triptych.core.errors import DeviceError
from triptych.core.kernels.native.build import BuildError, build

if TYPE_CHECKING:
    from triptych.core.kernels.paged_attention import AttentionBatch

_log = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MAX_HEAD_DIM = 256
_MAX_GROUP = 64


class _Attention(ctypes.Structure):
    """`Attention` in attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_pages", "v_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("page_table", "context_lengths", "query_starts")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "q_stride")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("page_shift", "q_dtype", "kv_dtype", "window")),
        ("num_threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class NativeKernels:
    """The loaded library. Threads may share it."""

    __slots__ = ("_attention",)

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._attention = library.paged_attention
        self._attention.argtypes = (ctypes.POINTER(_Attention),)
        self._attention.restype = ctypes.c_int

    @classmethod
    def open(cls, mode: str, folder: Path) -> NativeKernels | None:
        """Build or find the library. `mode` is the option `cpu_kernels`: auto, native or torch.

        `torch` gives `None`; so does `auto` where nothing can be built, and logs why. `native`
        raises `DeviceError` then.
        """
        if mode == "torch":
            return None
        try:
            return cls(build(folder))
        except (BuildError, OSError) as error:
            if mode == "native":
                raise DeviceError(
                    f"No native kernels: {error}. Use --cpu-kernels torch."
                ) from error
            _log.warning("no native kernels (%s); torch's run instead, slower", error)
            return None

    def can_attend(self, q_THD: torch.Tensor, k_pages_NPKD: torch.Tensor) -> bool:
        """Whether `paged_attention` takes these types and shapes."""
        _, page_size, num_kv_heads, head_dim = k_pages_NPKD.shape
        return (
            q_THD.dtype in _DTYPES
            and k_pages_NPKD.dtype in _DTYPES
            and q_THD.stride(1) == head_dim <= _MAX_HEAD_DIM
            and q_THD.shape[1] // num_kv_heads <= _MAX_GROUP
            and page_size.bit_count() == 1
        )

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_pages_NPKD: torch.Tensor,
        v_pages_NPKD: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """`core.kernels.paged_attention.paged_attention`, where `can_attend` allows it."""
        num_tokens, num_heads, head_dim = q_THD.shape
        out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THD.dtype)
        _, page_size, num_kv_heads, _ = k_pages_NPKD.shape
        table_BM = batch.page_table_BM
        arguments = _Attention(
            q_THD.data_ptr(),
            k_pages_NPKD.data_ptr(),
            v_pages_NPKD.data_ptr(),
            out_THD.data_ptr(),
            table_BM.data_ptr(),
            batch.context_lengths_B.data_ptr(),
            batch.query_starts_B.data_ptr(),
            len(table_BM),
            num_tokens,
            q_THD.stride(0),
            table_BM.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size.bit_length() - 1,
            _DTYPES[q_THD.dtype],
            _DTYPES[k_pages_NPKD.dtype],
            window or 0,
            torch.get_num_threads(),
            scale,
        )
        if self._attention(arguments):
            raise MemoryError("no memory for a step's attention")
        return out_THD
