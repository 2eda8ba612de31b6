from pathlib import Path

import pytest

from triptych.core.kernels.native.library import NativeKernels


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    folder: Path = tmp_path_factory.mktemp("kernels")
    kernels = NativeKernels.open("native", folder)
    assert kernels is not None
    return kernels
