"""Loads a whole model as a class of transformers.

Owns the call, and the check that the class used every tensor. The caller chooses the class; no code
of a checkpoint is ever executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint, TensorSource
from triptych.core.runtime.tensors.loading import MAX_NAMED
from triptych.core.runtime.tensors.quiet import transformers_loading


def load_whole(kind: Any, checkpoint: Checkpoint, **given: Any) -> tuple[Any, Mapping[str, Any]]:
    """A checkpoint loaded as transformers' class `kind`, and a report for `check_complete`.

    Raises `WeightsError` where its weights are quantized.
    """
    if checkpoint.encoding:
        raise WeightsError(
            f"Its weights are quantized by {checkpoint.encoding}, which is read for the families of"
            " our own decoder alone (docs/models.md): take its bfloat16 files."
        )
    with transformers_loading():
        model, info = kind.from_pretrained(
            checkpoint.folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **given,
        )
    return model, info


def check_complete(info: Mapping[str, Any], source: TensorSource) -> None:
    """Raise `WeightsError` naming tensors that are missing, left over or of another shape."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            named = ", ".join(sorted(map(str, info[problem]))[:MAX_NAMED])
            files = ", ".join(sorted({t.file for t in source.tensors.values()})[:MAX_NAMED])
            raise WeightsError(f"{problem.replace('_', ' ')} in {files}: {named}.")
