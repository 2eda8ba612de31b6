"""Compiled GPU kernels of a bundle come to lie where Triton finds them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from triptych.core.bundle.manifest import TRITON, BundleManifest
from triptych.core.bundle.store import Bundle, write_bundle
from triptych.core.bundle.triton_cache import restore, use_triton_cache
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.process.versions import versions

TARGET = "cuda:90"


def fill(folder: Path) -> BundleManifest:
    kernel = folder / TRITON / "cuda-90" / "HASH"
    kernel.mkdir(parents=True)
    (kernel / "square.cubin").write_bytes(b"code")
    group = {"child_paths": {"square.cubin": "/where/it/was/made/HASH/square.cubin"}}
    (kernel / "__grp__square.json").write_text(json.dumps(group))
    other = folder / TRITON / "cuda-100"
    other.mkdir()
    (other / "other.cubin").write_bytes(b"")
    return BundleManifest(
        made_at="", versions=versions(), options={}, device="cpu", targets={TARGET: ("square",)}
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    write_bundle(tmp_path / "bundle", fill)
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton_cache.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # put back at the end
    monkeypatch.delenv("TRITON_CACHE_DIR")


def used(cache: Path, bundle: Bundle | None, target: str = TARGET) -> list[Lookup]:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        use_triton_cache(str(cache), target, str(bundle.folder) if bundle else "")
    return heard


def test_kernels_name_each_other_by_their_new_places(bundle: Bundle, tmp_path: Path) -> None:
    (lookup,) = used(tmp_path / "cache", bundle)
    assert (lookup.what, lookup.is_hit, lookup.is_promised) == (TARGET, True, True)
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder == tmp_path / "cache" / "triton" / "cuda-90"
    assert (folder / "HASH" / "square.cubin").read_bytes() == b"code"
    group = json.loads((folder / "HASH" / "__grp__square.json").read_text())["child_paths"]
    assert group == {"square.cubin": str(folder / "HASH" / "square.cubin")}
    assert {path.name for path in folder.iterdir()} == {"HASH"}, "nothing of another device"


def test_what_is_there_already_stays(bundle: Bundle, tmp_path: Path) -> None:
    place = tmp_path / "HASH" / "square.cubin"
    place.parent.mkdir()
    place.write_bytes(b"mine")
    restore(bundle, TARGET, tmp_path)
    assert place.read_bytes() == b"mine"


def test_a_damaged_kernel_is_left_out(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.folder / TRITON / "cuda-90" / "HASH" / "square.cubin").write_bytes(b"evil")
    (lookup,) = used(tmp_path / "cache", bundle)
    assert not lookup.is_hit
    assert "damaged" in lookup.reason
    assert not list((tmp_path / "cache").rglob("*.cubin"))


def test_those_of_another_triton_are_left_out(tmp_path: Path) -> None:
    def fill_as_before(folder: Path) -> BundleManifest:
        return msgspec.structs.replace(fill(folder), versions={"triton": "1.0"})

    write_bundle(tmp_path / "old", fill_as_before)
    (lookup,) = used(tmp_path / "cache", Bundle.open(tmp_path / "old"))
    assert "triton 1.0" in lookup.reason
    assert not list((tmp_path / "cache").rglob("*.cubin"))


def test_without_a_promise_there_is_nothing_to_report(bundle: Bundle, tmp_path: Path) -> None:
    assert used(tmp_path / "cache", None) == []
    assert used(tmp_path / "cache", bundle, "hip:gfx942") == []


def test_a_folder_of_the_users_own_choice_stays(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    used(tmp_path / "cache", bundle)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert (tmp_path / "mine" / "HASH" / "square.cubin").exists()
