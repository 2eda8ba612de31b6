from __future__ import annotations

from typing import Any

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.core.runtime.kernels.attention_backends import (
    BACKENDS,
    FLASH,
    TRITON,
    choose_backend,
)

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)


def choose(
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (9, 0),
    hip: str | None = None,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    **options: Any,
) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    return choose_backend(wanted, dtype, head_dim, CUDA, **{"is_deterministic": False} | options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_ours_serve_every_model(
    dtype: torch.dtype, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wanted in ("auto", TRITON):
        given = {"dtype": dtype, "head_dim": 36, "is_deterministic": is_deterministic}
        assert choose(wanted, monkeypatch, capability=(7, 5), **given) == TRITON


def test_the_librarys_serves_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(FLASH, monkeypatch) == FLASH
    assert choose(FLASH, monkeypatch, capability=(8, 0), head_dim=256) == FLASH


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "does not compute in float32"),
        ({"head_dim": 264}, "heads of 264"),
        ({"head_dim": 36}, "heads of 36"),
        ({"is_deterministic": True}, "--enable-deterministic-inference"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"hip": "7.1"}, "CUDA device"),
    ],
)
def test_what_it_lacks_is_named(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=rf"^--attention-backend flash: .*{reason}"):
        choose(FLASH, monkeypatch, **options)


def test_a_cpu_has_no_choice() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", BF16, 64, cpu, is_deterministic=False) == TRITON
    for name in BACKENDS:
        with pytest.raises(ConfigError, match="that is for GPUs"):
            choose_backend(name, BF16, 64, cpu, is_deterministic=False)
