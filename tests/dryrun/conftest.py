"""The GPU, which is not there unless `pytest -m gpu` has one; and what its steps are held to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fake_cuda import FakeCuda
from support.kernel_device import is_interpreted
from support.real_cuda import RealCuda
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
    SpeechOptions,
)


@pytest.fixture
def gpu() -> Iterator[FakeCuda | RealCuda]:
    """On it for the length of a test."""
    with FakeCuda() if is_interpreted() else RealCuda() as gpu:
        yield gpu


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Small batches, so that prompts are cut and rows share steps; each is launched again."""
    return Config(
        device=DeviceOptions(device_graph_capture=False),
        models=ModelOptions(cache_dir=str(tmp_path_factory.mktemp("cache"))),
        cache=CacheOptions(kv_cache_page_size=4),
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        speech=SpeechOptions(max_streams=4),
    )
