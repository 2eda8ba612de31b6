"""What tests of interpreted kernels share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.kernel_device import is_interpreted


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies each row of a tile alike, wherever it lies, as a GPU does.

    It asks numpy for the whole tile, and on processors without AVX-512 OpenBLAS sums a row
    otherwise at a tile's end than in its middle.
    """
    if not is_interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.ndim != 2:
            return whole(self, a, b, d, *options)
        rows = [
            whole(self, TensorHandle(one, a.dtype), b, TensorHandle(sums, d.dtype), *options).data
            for one, sums in zip(a.data[:, None], d.data[:, None], strict=True)
        ]
        return TensorHandle(np.concatenate(rows), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
