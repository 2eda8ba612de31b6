"""Reading files that `torch.save` wrote, without running anything found in them.

Owns what is said of a file that holds more than data. Knows no layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]

from triptych.core.errors import WeightsError


def read_torch_file(file: Path) -> Any:
    """What is in a .pt or .pth file, tensors on the CPU; torch's restricted reader reads it.

    Raises `WeightsError` for a file that is damaged or would run code.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise WeightsError(
            f"{file.name} cannot be read: it is damaged, or holds more than tensors."
        ) from error
