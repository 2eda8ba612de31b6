"""Loads a whole model as a class of transformers.

Owns the call, and the check that the class used every tensor. The caller chooses the class; no code
of a checkpoint is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint, TensorSource
from triptych.core.runtime.tensors.loading import MAX_NAMED
from triptych.core.runtime.tensors.quiet import transformers_loading

_LAYER = re.compile(r"(?:^|model\.)layers\.(\d+)\.")
Reader = Callable[[Checkpoint], Tensor]
"""Reads one tensor of a class, from one tensor of a checkpoint or from several."""


def load_whole(
    kind: Any, checkpoint: Checkpoint, readers: Mapping[str, Reader] | None = None, **given: Any
) -> tuple[Any, Mapping[str, Any]]:
    """A checkpoint loaded as transformers' class `kind`, and a report for `check_complete`.

    The class reads the files itself, or the tensors of `readers` if given, by its own conversions.
    Raises `WeightsError` where it would read quantized files.
    """
    folder: Any = checkpoint.folder
    source: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    if readers is not None:
        lazies = {name: _LazyTensor(checkpoint, read) for name, read in readers.items()}
        folder, source = None, {"state_dict": lazies}
    elif is_quantized(checkpoint):
        raise WeightsError(
            f"Its weights are quantized{' by ' * bool(checkpoint.encoding)}{checkpoint.encoding},"
            " which is read for language models alone (docs/models.md): take its bfloat16 files."
        )
    with transformers_loading():
        model, info = kind.from_pretrained(
            folder,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **source,
            **given,
        )
    return model, info


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether any matrix of a checkpoint is quantized."""
    return bool(checkpoint.encoding) or any(each.format for each in checkpoint.tensors.values())


class _LazyTensor:
    """A tensor that is read when transformers asks for all of its values."""

    def __init__(self, checkpoint: Checkpoint, read: Reader) -> None:
        self._checkpoint, self._read = checkpoint, read

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._read(self._checkpoint)


def check_complete(info: Mapping[str, Any], source: TensorSource, num_layers: int = 0) -> None:
    """Raise `WeightsError` naming tensors that are missing, left over or of another shape.

    Layers after `num_layers`, if given, predict further tokens, and may be left over.
    """
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = list(map(str, info[problem]))
        if problem == "unexpected_keys":
            keys = [key for key in keys if not _is_after(key, num_layers)]
        if keys:
            named = ", ".join(sorted(keys)[:MAX_NAMED])
            files = ", ".join(sorted({t.file for t in source.tensors.values()})[:MAX_NAMED])
            raise WeightsError(f"{problem.replace('_', ' ')} in {files}: {named}.")


def _is_after(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer after so many; false for 0."""
    found = _LAYER.search(name)
    return bool(num_layers and found and int(found[1]) >= num_layers)
