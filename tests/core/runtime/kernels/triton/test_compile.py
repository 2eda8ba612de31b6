"""Kernels compiled ahead for devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from support.tiers import first
from support.triton_attention import attention_keys, latent_keys
from support.triton_operations import operation_keys
from triptych.core.errors import ConfigError
from triptych.core.runtime.kernels.triton import compile as command
from triptych.core.runtime.kernels.triton.compile import (
    TARGETS,
    CompiledVariant,
    CompileTarget,
    _prepare_process,
    compile_all,
    kernel_modules,
)
from triptych.core.runtime.kernels.triton.resources import Resources

pytest.importorskip("triton")

SM_90 = CompileTarget.parse("cuda:sm_90")


def test_targets_are_read() -> None:
    assert [str(target) for target in TARGETS] == [
        "cuda:80",
        "cuda:89",
        "cuda:90",
        "cuda:100",
        "hip:gfx942",
    ]
    assert CompileTarget.parse("cuda:90") == SM_90
    assert [target.warp_size for target in TARGETS] == [32, 32, 32, 32, 64]
    assert CompileTarget.parse("hip:gfx1100").warp_size == 32


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:", "cuda:sm_", "hip:90", "gpu:90", "cuda:hopper"]
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a target"):
        CompileTarget.parse(text)


def test_kernels_compile_here_and_are_found_the_second_time(tmp_path: Path) -> None:
    """In a process that interprets kernels, as this one does."""
    seen: list[CompiledVariant] = []
    ahead = compile_all([SM_90], tmp_path, seen.append, ["add_rms_norm", "variant"])
    assert [each.error for each in ahead] == [None] * len(ahead)
    assert {each.name for each in ahead} >= {"add_rms_norm.add_4096", "add_rms_norm.add_16384"}
    assert sorted(each.name for each in seen) == [each.name for each in ahead]
    assert not any(each.is_hit for each in ahead)
    for each in ahead:
        assert each.resources is not None
        assert 0 < each.resources.registers <= 255
    second = compile_all([SM_90], tmp_path, modules=["add_rms_norm"])
    assert all(each.is_hit for each in second)
    assert [each.resources for each in second] == [each.resources for each in ahead]


@pytest.mark.parametrize("target", first(TARGETS[2::2]), ids=str)
def test_a_launch_finds_what_was_compiled_ahead(target: CompileTarget) -> None:
    """Same types, constants, alignment, warps and stages: else a server would compile again."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(None,)
    ) as pool:
        keys = pool.submit(attention_keys, target).result()
        assert keys.keys() == {"split", "join", "causal"}
        keys |= pool.submit(operation_keys, target).result()
        keys |= pool.submit(latent_keys, target).result()
    assert {name for name, (launched, ahead) in keys.items() if launched != ahead} == set()


def compiled(name: str, registers: int = 40, error: str | None = None) -> CompiledVariant:
    module, variant = name.split(".")
    resources = Resources(registers, 0, 0)
    return CompiledVariant(
        module=module, variant=variant, target=SM_90, error=error, resources=resources
    )


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command's exit code, for a record of two modules and what a compiler might say."""
    record = {f"{name} on cuda:90": Resources(40, 0, 0) for name in ("a.x", "b.y")}
    monkeypatch.setattr(command, "load_record", lambda: dict(record))
    monkeypatch.setattr(command, "save_record", lambda now: (record.clear(), record.update(now)))

    def check(arguments: str, *results: CompiledVariant) -> int:
        monkeypatch.setattr(command, "compile_all", lambda *_: list(results))
        return command.main(arguments.split())

    return check


def test_the_check_fails_for_what_does_not_compile_or_takes_more(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("--check", compiled("a.x"), compiled("b.y")) == 0
    assert check("--check", compiled("a.x", 80), compiled("b.y")) == 1
    assert "a.x on cuda:90: registers 80, was 40" in capsys.readouterr().err
    assert check("--check", compiled("a.x", error="no such type"), compiled("b.y")) == 1
    assert "a.x on cuda:90: no such type" in capsys.readouterr().err
    assert check("--check", compiled("a.x")) == 1
    assert "b.y on cuda:90: recorded, but missing" in capsys.readouterr().err


def test_the_check_of_a_module_leaves_the_others_alone(check: Callable[..., int]) -> None:
    assert check("--check a", compiled("a.x")) == 0
    assert check("--update a", compiled("a.x", 80), compiled("a.z")) == 0
    assert check("--check", compiled("a.x", 80), compiled("a.z"), compiled("b.y")) == 0


def test_every_kernel_of_the_folder_is_visited() -> None:
    assert {"paged_decode", "paged_prefill"} <= set(kernel_modules())
