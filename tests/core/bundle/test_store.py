"""Bundles appear whole or not at all, and are used only where they were meant for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from triptych.core.bundle.manifest import NAME, BundledModel, BundleManifest
from triptych.core.bundle.store import (
    Bundle,
    bundle_folder,
    content_options,
    find_bundle,
    write_bundle,
)
from triptych.core.errors import BundleError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.process.versions import versions
from triptych.core.weights.manifest import MANIFEST_NAME, FileSeal, sha256_file

MANIFEST = BundleManifest(
    made_at="", versions=versions(), options=content_options(ModelOptions()), device="cpu"
)


def fill_with(content: bytes, manifest: BundleManifest = MANIFEST) -> Callable[..., BundleManifest]:
    def fill(folder: Path) -> BundleManifest:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_bytes(content)
        return manifest

    return fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle."""
    write_bundle(tmp_path / "bundle", fill_with(b"content"))
    return tmp_path / "bundle"


def found(options: ModelOptions) -> tuple[Bundle | None, list[Lookup]]:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        return find_bundle(options, ["m"]), heard


def test_a_bundle_is_read_and_its_files_are_proven(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.file("part/file").read_bytes() == b"content"
    (folder / "part" / "file").write_bytes(b"CONTENT")
    with pytest.raises(BundleError, match="file of the bundle is damaged"):
        bundle.file("part/file")
    (folder / "part" / "file").unlink()
    with pytest.raises(BundleError, match="file is missing"):
        bundle.file("part/file")


@pytest.mark.parametrize("name", ["other", "../outside", "/etc/passwd", NAME])
def test_only_what_is_promised_is_given_out(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_text("")
    (folder / "other").write_text("")
    with pytest.raises(BundleError, match="does not contain"):
        Bundle.open(folder).file(name)


def test_a_new_bundle_takes_the_place_of_the_old_one(folder: Path) -> None:
    write_bundle(folder, fill_with(b"newer"))
    assert Bundle.open(folder).file("part/file").read_bytes() == b"newer"
    assert {path.name for path in folder.parent.iterdir()} == {"bundle", ".bundle.lock"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_interrupts_the_making_leaves_the_old_one(
    folder: Path, error: type[BaseException]
) -> None:
    def fill(partial: Path) -> BundleManifest:
        (partial / "half").write_text("")
        raise error

    with pytest.raises(error):
        write_bundle(folder, fill)
    assert Bundle.open(folder).file("part/file").read_bytes() == b"content"
    with pytest.raises(error):
        write_bundle(folder.with_name("fresh"), fill)
    assert not folder.with_name("fresh").exists()
    assert not list(folder.parent.glob("*.partial"))


def test_a_killed_maker_is_cleared_away(folder: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from triptych.core.bundle import store;"
        "store.write_bundle(Path(sys.argv[1]), lambda partial: os._exit(0))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    (leftover,) = folder.parent.glob("*.partial")
    assert Bundle.open(folder).file("part/file").read_bytes() == b"content"
    write_bundle(folder, fill_with(b"newer"))
    assert not leftover.exists()
    assert Bundle.open(folder).file("part/file").read_bytes() == b"newer"


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(BundleError, match="is not a bundle"):
        write_bundle(tmp_path / "thesis", fill_with(b""))
    assert (tmp_path / "thesis" / "chapter").read_text() == "one"


def test_whatever_the_umask_is_others_cannot_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_bundle(tmp_path / "bundle", fill_with(b""))
    finally:
        os.umask(before)
    Bundle.open(tmp_path / "bundle").file("part/file")


def test_whatever_the_umask_is_models_can_be_used(tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    kept.write_bytes(b"weights")
    kept.chmod(0o664)

    def fill(folder: Path) -> BundleManifest:
        model = folder / "models" / "m"
        model.mkdir(parents=True)
        os.link(kept, model / "weights")
        (model / MANIFEST_NAME).write_bytes(b"{}")
        seal = sha256_file(model / MANIFEST_NAME)
        bundled = BundledModel(reference="r", digest="d", folder="m", seal=seal)
        return structs.replace(MANIFEST, models=(bundled,))

    before = os.umask(0o002)
    try:
        write_bundle(tmp_path / "bundle", fill)
    finally:
        os.umask(before)
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.model_folder(bundle.manifest.models[0]) == tmp_path / "bundle" / "models" / "m"
    assert kept.stat().st_mode & 0o777 == 0o664, "the cache's own file stays as it is"


@pytest.mark.parametrize("part", [".", "part/file"])
def test_what_others_can_write_is_refused(folder: Path, part: str) -> None:
    (folder / part).chmod(0o777)
    with pytest.raises(BundleError, match="chmod -R go-w"):
        Bundle.open(folder).file("part/file")


def test_the_folder_follows_from_models_and_options(tmp_path: Path) -> None:
    options = ModelOptions(cache_dir=str(tmp_path))
    places = {
        bundle_folder(ModelOptions(cache_dir=str(tmp_path), **fields), references)
        for fields in ({}, {"dtype": "float32"}, {"revision": "v1"})
        for references in (["a"], ["b"], ["a", "b"])
    }
    assert len(places) == 9
    assert all(place.parent == tmp_path / "bundles" for place in places)
    named = ModelOptions(cache_dir=str(tmp_path), bundle=str(tmp_path / "x"))
    assert bundle_folder(named, ["a"]) == tmp_path / "x"
    assert bundle_folder(options, ["a"]) in places


def test_the_one_in_the_cache_is_found(tmp_path: Path) -> None:
    options = ModelOptions(cache_dir=str(tmp_path))
    assert found(options) == (None, [])
    write_bundle(bundle_folder(options, ["m"]), fill_with(b""))
    bundle, (lookup,) = found(options)
    assert bundle is not None
    assert (lookup.phase, lookup.is_hit) == ("bundle", True)
    assert found(ModelOptions(cache_dir=str(tmp_path), bundle="none")) == (None, [])


def test_a_damaged_one_in_the_cache_is_left_alone_with_a_reason(tmp_path: Path) -> None:
    options = ModelOptions(cache_dir=str(tmp_path))
    folder = bundle_folder(options, ["m"])
    write_bundle(folder, fill_with(b""))
    (folder / NAME).write_bytes(b"{}")
    bundle, (lookup,) = found(options)
    assert bundle is None
    assert (lookup.is_hit, lookup.is_promised) == (False, True)
    assert "damaged" in lookup.reason


def test_one_that_was_named_has_to_be_one(folder: Path) -> None:
    with pytest.raises(BundleError, match="no bundle at that path"):
        found(ModelOptions(bundle=str(folder / "nowhere")))
    (folder / NAME).write_bytes(b"{}")
    with pytest.raises(BundleError, match="damaged"):
        found(ModelOptions(bundle=str(folder)))


def test_a_moved_one_is_as_good(folder: Path) -> None:
    moved = folder.rename(folder.with_name("elsewhere"))
    bundle, (lookup,) = found(ModelOptions(bundle=str(moved)))
    assert bundle is not None
    assert lookup.is_hit


@pytest.mark.parametrize(
    ("manifest", "options", "reason"),
    [
        ({"versions": {"triptych": "0.0.9"}}, {}, "built by triptych 0.0.9"),
        ({"versions": {}}, {}, "built by triptych unknown"),
        ({}, {"dtype": "float32"}, "built with --dtype 'auto', but this is 'float32'"),
        ({}, {"model_override": ("vae.path=x",)}, "--model-override ''"),
    ],
)
def test_one_for_something_else_misses_with_its_reason(
    tmp_path: Path, manifest: dict[str, object], options: dict[str, str], reason: str
) -> None:
    made = msgspec.structs.replace(MANIFEST, **manifest)
    write_bundle(tmp_path / "bundle", fill_with(b"", made))
    bundle, (lookup,) = found(ModelOptions(bundle=str(tmp_path / "bundle"), **options))
    assert bundle is None
    assert lookup.is_promised
    assert not lookup.is_hit
    assert reason in lookup.reason


KEPT = "part/file"


def tampered(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / KEPT).read_bytes())
    match name:
        case "link":
            (folder / KEPT).unlink()
            (folder / KEPT).symlink_to(outside)
        case "linked folder":
            (folder / "part").rename(folder.parent / "elsewhere")
            (folder / "part").symlink_to(folder.parent / "elsewhere")
        case "writable folder":
            (folder / "part").chmod(0o777)
        case "writable file":
            (folder / KEPT).chmod(0o666)
        case "group's file":
            (folder / KEPT).chmod(0o664)
        case "writable manifest":
            (folder / NAME).chmod(0o666)
        case "linked manifest":
            (folder / NAME).rename(folder.parent / NAME)
            (folder / NAME).symlink_to(folder.parent / NAME)
        case "writable bundle":
            folder.chmod(0o777)


@pytest.mark.parametrize(
    "name",
    [
        *("link", "linked folder", "writable folder", "writable file", "group's file"),
        *("writable manifest", "linked manifest", "writable bundle"),
    ],
)
def test_what_others_could_change_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bundle"
    write_bundle(folder, fill_with(b"content"))
    assert Bundle.open(folder).file(KEPT)
    tampered(folder, name)
    with pytest.raises(BundleError, match=r"is a link|can write"):
        Bundle.open(folder).file(KEPT)


@pytest.mark.parametrize("place", ["absolute", "above", "within"])
def test_names_that_lead_out_are_refused(tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    name = {"absolute": str(outside), "above": "../outside", "within": "part/../../outside"}[place]
    folder = tmp_path / "bundle"
    write_bundle(folder, fill_with(b"content"))
    found = Bundle.open(folder)
    seals = {name: FileSeal(1, sha256_file(outside))}
    lying = Bundle(folder, structs.replace(found.manifest, files=seals))
    with pytest.raises(BundleError, match="outside"):
        lying.file(name)
