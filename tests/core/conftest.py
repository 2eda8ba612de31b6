from pathlib import Path

import pytest

from triptych.core.kernels.native.build import build, supported_levels
from triptych.core.kernels.native.library import NativeKernels

# The tile code over a model of the tile instructions, as the highest vector level below it.
TILES = "tiles, modelled"


@pytest.fixture(scope="session", params=(TILES, *supported_levels()))
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The kernels at every instruction level of this machine."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    if request.param == TILES:
        levels = [level for level in supported_levels() if level != "amx"]
        return NativeKernels(build(folder, levels[0], "MODEL_TILES"), levels[0])
    kernels = NativeKernels.open("native", folder, request.param)
    assert kernels is not None
    return kernels
