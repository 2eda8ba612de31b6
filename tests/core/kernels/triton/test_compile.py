"""Kernels compiled ahead for devices that are not here."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from support.triton_attention import attention_keys
from triptych.core.errors import ConfigError
from triptych.core.kernels.triton.compile import (
    TARGETS,
    CompiledVariant,
    CompileTarget,
    _prepare_process,
    compile_all,
    kernel_modules,
)

pytest.importorskip("triton")

SM_90 = CompileTarget.parse("cuda:sm_90")


def test_targets_are_read() -> None:
    assert [str(target) for target in TARGETS] == ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]
    assert CompileTarget.parse("cuda:90") == SM_90
    assert [target.warp_size for target in TARGETS] == [32, 32, 32, 64]
    assert CompileTarget.parse("hip:gfx1100").warp_size == 32


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:", "cuda:sm_", "hip:90", "gpu:90", "cuda:hopper"]
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no target"):
        CompileTarget.parse(text)


def test_kernels_compile_here_and_are_found_the_second_time(tmp_path: Path) -> None:
    """In a process that interprets kernels, as this one does."""
    seen: list[CompiledVariant] = []
    first = compile_all([SM_90], tmp_path, seen.append, ["paged_decode", "variant"])
    assert [each.error for each in first] == [None] * len(first)
    assert {each.name for each in first} >= {"paged_decode.split", "paged_decode.join"}
    assert sorted(each.name for each in seen) == [each.name for each in first]
    assert not any(each.is_hit for each in first)
    for each in first:
        assert each.resources is not None
        assert 0 < each.resources.registers <= 255
    second = compile_all([SM_90], tmp_path, modules=["paged_decode"])
    assert all(each.is_hit for each in second)
    assert [each.resources for each in second] == [each.resources for each in first]


@pytest.mark.parametrize("target", TARGETS[1::2], ids=str)
def test_a_launch_finds_what_was_compiled_ahead(target: CompileTarget) -> None:
    """Same types, constants, alignment, warps and stages: else a server would compile again."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(None,)
    ) as pool:
        keys = pool.submit(attention_keys, target).result()
    assert keys.keys() == {"split", "join", "causal"}
    for launched, ahead in keys.values():
        assert launched == ahead


def test_every_kernel_of_the_folder_is_visited() -> None:
    assert {"paged_decode", "paged_prefill"} <= set(kernel_modules())
