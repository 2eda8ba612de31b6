"""A verified, lazily mapped set of named tensors, with the configs of its folder.

Owns reading tensors of a safetensors folder. `layout` checks the contents of the folder; `loading`
decides where tensors go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import StoredWeight
from triptych.core.weights.layout import (
    TensorInfo,
    read_header,
    read_json,
    read_json_if_there,
    read_layout,
)
from triptych.core.weights.manifest import verify_if_sealed
from triptych.core.weights.plausible import check_plausible

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.native.library import NativeKernels

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class TensorSource(Protocol):
    """Named tensors that can be read one at a time, whatever their format."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU. Raises `WeightsError` naming it and its file."""


class Checkpoint:
    """Tensors and configs of one model folder. Use as a context manager; reads after it fail.

    `encoding` names the quantization of its matrices, if they are not in blocks. Blocks are read by
    the CPU kernels once `native` is set, and by torch until then, with the same results but many
    times slower.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorInfo], config: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.tensors = tensors
        self.config = config
        self.encoding = ""
        self.native: NativeKernels | None = None
        self.generation_config = read_json_if_there(folder / "generation_config.json")
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open `folder` after checking its headers, and its checksums where it has a manifest.

        Raises `WeightsError` naming file and tensor when anything is missing or damaged.
        """
        path = Path(folder)
        verify_if_sealed(path)
        tensors, config = read_layout(path), read_json(path / "config.json")
        check_plausible(config, tensors)
        return cls(path, tensors, config)

    @classmethod
    def open_file(cls, file: Path, config: dict[str, Any]) -> Checkpoint:
        """Open one safetensors file after checking its header; `config` has the settings."""
        tensors = read_header(file)
        check_plausible(config, tensors)
        return cls(file.parent, tensors, config)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type that most of the checkpoint's bytes have."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in _TORCH_DTYPES:
                sizes[info.dtype] += info.num_bytes
        return _TORCH_DTYPES[max(sizes, key=lambda dtype: sizes[dtype])] if sizes else torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, mapped from its file: pages are read when touched.

        Blocks of integers are dequantized to the type of the other tensors.
        """
        packed, dtype = self.read_packed(name), self.dtype
        if packed is None:
            return self._map(self._info(name))
        if self.native is not None and self.native.can_dequantize(packed, dtype):
            return self.native.dequantize(packed, dtype)
        return packed.dequantize(dtype)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Read a matrix of integer blocks, mapped; `None` for any other tensor."""
        info = self._info(name)
        return PackedTensor(self._map(info), FORMATS[info.format]) if info.format else None

    def read_stored(self, name: str) -> StoredWeight | None:
        """Read a quantized matrix as stored, if a GPU kernel takes it; else `None`."""
        return None

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise WeightsError(f"The checkpoint has no tensor {name!r}.")
        return info

    def _map(self, info: TensorInfo) -> torch.Tensor:
        handle = self._of(info.file)
        try:
            return handle.get_tensor(info.name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"Tensor {info.name!r} cannot be read from {info.file}.") from error

    def metadata(self) -> dict[str, str]:
        """The metadata of all files together."""
        files = dict.fromkeys(info.file for info in self.tensors.values())
        return {
            key: value for file in files for key, value in (self._of(file).metadata() or {}).items()
        }

    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""
        self._handles.clear()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, file: str) -> Any:
        """The mapped file, opened at its first use."""
        if file not in self._handles:
            try:
                handle = self._files.enter_context(safe_open(self.folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file} cannot be opened as safetensors.") from error
            self._handles[file] = handle
        return self._handles[file]
