import logging
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from triptych.core.bundle.manifest import BundleManifest
from triptych.core.bundle.store import Bundle, write_bundle
from triptych.core.errors import DeviceError
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.runtime.kernels.native import build as build_module
from triptych.core.runtime.kernels.native import library as library_module
from triptych.core.runtime.kernels.native.build import BuildError, build
from triptych.core.runtime.kernels.native.library import NativeKernels


@pytest.fixture(scope="module")
def built(kernels_of: Callable[[str], NativeKernels]) -> Path:
    return kernels_of("portable").path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A private folder with the built library."""
    copy = tmp_path / "kernels"
    copy.mkdir()
    shutil.copy(built, copy)
    return copy


@pytest.fixture
def one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that take no time to compile."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(build_module, "_SOURCES", sources)


def no_compiler(*_: object) -> None:
    raise BuildError("the compiler was called")


def test_a_built_library_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_compile", no_compiler)
    assert build(folder).parent == folder


def test_the_folder_is_private(folder: Path) -> None:
    folder.chmod(0o777)
    build(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.usefixtures("one_source")
def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    path = build(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    rebuilt = build(folder)
    assert rebuilt.read_bytes() != bytes(content)
    assert list(folder.iterdir()) == [rebuilt]


@pytest.mark.usefixtures("one_source")
def test_other_sources_make_another_library(folder: Path) -> None:
    build(folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.usefixtures("one_source")
def test_concurrent_builds_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(build, [tmp_path / "kernels"] * 4))
    assert set((tmp_path / "kernels").iterdir()) == paths


def test_a_linked_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(BuildError, match="another user"):
        build(link)


def test_a_failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "bad.c").write_text("not C")
    monkeypatch.setattr(build_module, "_SOURCES", sources)
    with pytest.raises(BuildError, match="compiler failed"):
        build(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "_COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert NativeKernels.open("auto", tmp_path) is None
    assert len(caplog.records) == 1
    with pytest.raises(DeviceError, match="--cpu-kernels torch"):
        NativeKernels.open("native", tmp_path)


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert NativeKernels.open("auto", tmp_path / "file" / "kernels") is None


def test_torch_builds_nothing(tmp_path: Path) -> None:
    assert NativeKernels.open("torch", tmp_path / "kernels") is None
    assert not (tmp_path / "kernels").exists()


def test_a_level_is_honoured_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = NativeKernels.open("auto", folder, "portable")
    assert kernels is not None
    assert kernels.level == "portable"
    with pytest.raises(DeviceError, match="--cpu-isa has no effect"):
        NativeKernels.open("torch", folder, "portable")
    monkeypatch.setattr(build_module, "_macros", lambda *_: frozenset())
    with pytest.raises(DeviceError, match="lacks avx2: use --cpu-isa portable"):
        NativeKernels.open("auto", folder, "avx2")
    monkeypatch.setattr(build_module, "_COMPILERS", ("no-such-compiler",))
    with pytest.raises(DeviceError, match="No native kernels: no C compiler"):
        NativeKernels.open("auto", folder, "avx2")


def test_where_the_system_refuses_a_level_the_next_one_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_permission(folder: Path, level: str) -> Path:
        if level == "avx2":
            raise BuildError("refused")
        return build(folder, level)

    monkeypatch.setattr(library_module, "supported_levels", lambda: ("avx2", "portable"))
    monkeypatch.setattr(library_module, "build", without_permission)
    kernels = NativeKernels.open("auto", folder)
    assert kernels is not None
    assert kernels.level == "portable"


# Out of a bundle.


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Bundle:
    """A bundle with the portable library."""

    def fill(folder: Path) -> BundleManifest:
        kernels = build_module.bundle_library(built, "portable", folder)
        return BundleManifest(made_at="", versions={}, options={}, device="cpu", kernels=kernels)

    write_bundle(tmp_path / "bundle", fill)
    return Bundle.open(tmp_path / "bundle")


def opened(bundle: Bundle, folder: Path, isa: str = "auto") -> tuple[NativeKernels, Lookup]:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        kernels = NativeKernels.open("native", folder, isa, bundle)
    assert kernels is not None
    (lookup,) = heard
    assert lookup.is_promised
    return kernels, lookup


def test_a_bundled_library_needs_no_compiler(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_COMPILERS", ("no-such-compiler",))
    kernels, lookup = opened(bundle, tmp_path / "kernels")
    assert (kernels.level, lookup.is_hit) == ("portable", True)
    assert kernels.path.is_relative_to(bundle.folder)
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "riscv64"}, "another kind of processor"),
        ({"processor": ("amx", "sparc")}, "another kind of processor"),
        ({"recipe": "0"}, "built from other sources"),
        ({"level": "vax"}, "not portable"),
        ({"file": "nothing.so"}, "does not contain nothing.so"),
    ],
)
def test_a_bundled_library_for_something_else_is_built_here(
    bundle: Bundle, folder: Path, changes: dict[str, str], reason: str
) -> None:
    kernels = structs.replace(bundle.manifest.kernels, **changes)
    other = Bundle(bundle.folder, structs.replace(bundle.manifest, kernels=kernels))
    found, lookup = opened(other, folder, "portable")
    assert not lookup.is_hit
    assert reason in lookup.reason
    assert found.path.is_relative_to(folder)


def test_a_damaged_bundled_library_is_never_loaded(bundle: Bundle, folder: Path) -> None:
    path = bundle.folder / bundle.manifest.kernels.file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found, lookup = opened(bundle, folder, "portable")
    assert "damaged" in lookup.reason
    assert found.path.is_relative_to(folder)


def test_the_system_and_the_compiler_agree_on_the_levels() -> None:
    if not Path("/proc/cpuinfo").exists() or not build_module.supported_levels():
        pytest.skip("needs Linux and a C compiler")
    assert set(build_module.supported_levels()) <= set(build_module.processor_levels())


def test_without_a_word_of_the_system_any_processor_is_portable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_CPUINFO", tmp_path / "cpuinfo")
    assert build_module.processor_levels() == ("portable",)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c bmi2\n")
    assert build_module.processor_levels() == ("avx2", "portable")


def test_a_library_that_was_built_is_a_miss_and_then_a_hit(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build_module, "_compile", lambda command, folder, key: Path(shutil.copy(built, folder))
    )
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        NativeKernels.open("native", tmp_path / "kernels", "portable")
        NativeKernels.open("native", tmp_path / "kernels", "portable")
    assert [(each.is_hit, each.reason) for each in heard] == [
        (False, "not built before"),
        (True, ""),
    ]
