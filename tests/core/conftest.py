import pytest

from triptych.core.kernels.native.library import NativeKernels


@pytest.fixture(scope="session")
def native(kernels: NativeKernels) -> NativeKernels:
    """The kernels at every instruction level of this machine."""
    return kernels
