"""Weights in a bundle: linked in, proven when they are read, found on another machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from support.weight_files import write_gguf, write_shards
from triptych.core.bundle.contents import add_model
from triptych.core.bundle.manifest import MODELS, BundleManifest
from triptych.core.bundle.resolve import resolve_all
from triptych.core.bundle.store import content_options, write_bundle
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.process.versions import versions
from triptych.core.weights.manifest import MANIFEST_NAME
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel


def options(cache: Path, *references: Path | str, bundle: str = "none") -> ModelOptions:
    return ModelOptions(model=tuple(map(str, references)), cache_dir=str(cache), bundle=bundle)


def resolved(options: ModelOptions) -> tuple[tuple[ResolvedModel, ...], list[Lookup]]:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        models = resolve_all(options, SilentProgress())
    return models, [each for each in heard if each.phase == "weights"]


def write(folder: Path, models: Sequence[ResolvedModel], options: ModelOptions) -> BundleManifest:
    return write_bundle(
        folder,
        lambda partial: BundleManifest(
            made_at="",
            versions=versions(),
            options=content_options(options),
            device="cpu",
            models=tuple(add_model(partial, model, options) for model in models),
        ),
    )


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def bundle(gguf: Path, tmp_path: Path) -> Path:
    """A bundle of a converted model."""
    opts = options(tmp_path / "cache", gguf)
    models, _ = resolved(opts)
    write(tmp_path / "bundle", models, opts)
    return tmp_path / "bundle"


def test_another_machine_needs_neither_file_nor_cache(
    bundle: Path, gguf: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "cache")
    gguf.unlink()
    moved = bundle.rename(tmp_path / "moved")
    (model,), (lookup,) = resolved(options(tmp_path / "none", gguf, bundle=str(moved)))
    assert (lookup.what, lookup.is_hit, lookup.is_promised) == ("tiny", True, True)
    assert Path(model.folder).is_relative_to(moved)
    assert model.bundle == str(moved)
    assert not (tmp_path / "none").exists()


def test_the_bytes_are_not_stored_twice(bundle: Path, tmp_path: Path) -> None:
    (copy,) = (bundle / MODELS).glob("*/model.safetensors")
    (cached,) = (tmp_path / "cache" / "models").glob("*/model.safetensors")
    assert copy.samefile(cached)
    assert not (copy.parent / MANIFEST_NAME).samefile(cached.parent / MANIFEST_NAME)


def test_the_identity_is_that_of_a_start_without(bundle: Path, gguf: Path, tmp_path: Path) -> None:
    (without,), _ = resolved(options(tmp_path / "cache", gguf))
    (with_it,), _ = resolved(options(tmp_path / "cache", gguf, bundle=str(bundle)))
    assert with_it.digest == without.digest
    assert (without.bundle, with_it.bundle) == ("", str(bundle))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST_NAME])
def test_what_is_damaged_is_made_again(bundle: Path, gguf: Path, tmp_path: Path, name: str) -> None:
    (file,) = (bundle / MODELS).glob(f"*/{name}")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.unlink()
    file.write_bytes(content)
    (model,), (lookup,) = resolved(options(tmp_path / "cache", gguf, bundle=str(bundle)))
    assert (lookup.is_hit, lookup.is_promised) == (False, True)
    assert "damaged" in lookup.reason
    assert Path(model.folder).is_relative_to(tmp_path / "cache")
    assert model.bundle == str(bundle), "the rest of it may be whole"


def test_what_is_damaged_and_cannot_be_made_again_is_refused(
    bundle: Path, gguf: Path, tmp_path: Path
) -> None:
    (file,) = (bundle / MODELS).glob("*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    gguf.unlink()
    with pytest.raises(WeightsError, match="no GGUF file"):
        resolved(options(tmp_path / "none", gguf, bundle=str(bundle)))


def test_a_file_that_changed_since_is_read_again(bundle: Path, gguf: Path, tmp_path: Path) -> None:
    write_gguf(gguf, kind=Kind.F16)
    (model,), (lookup,) = resolved(options(tmp_path / "cache", gguf, bundle=str(bundle)))
    assert not lookup.is_hit
    assert Path(model.folder).is_relative_to(tmp_path / "cache")
    assert model.bundle == ""


def test_a_folder_of_the_users_own_stays_where_it_is(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "own", [{"a": torch.ones(3)}, {"b": torch.zeros(2)}])
    opts = options(tmp_path / "cache", folder)
    (model,), _ = resolved(opts)
    (bundled,) = write(tmp_path / "bundle", [model], opts).models
    assert bundled.folder == ""
    (model,), (lookup,) = resolved(options(tmp_path, folder, bundle=str(tmp_path / "bundle")))
    assert (model.folder, lookup.is_hit, lookup.is_promised) == (str(folder), True, True)
    assert model.bundle == str(tmp_path / "bundle")
    save_file({"b": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")
    (model,), (lookup,) = resolved(options(tmp_path, folder, bundle=str(tmp_path / "bundle")))
    assert model.bundle == ""
    assert "differ from those in the bundle" in lookup.reason


def test_a_snapshot_of_the_hub_is_sealed(tmp_path: Path) -> None:
    repository = tmp_path / "cache" / "hub" / "models--org--model"
    folder = write_shards(repository / "snapshots" / "c0", [{"a": torch.ones(3)}])
    (folder / MANIFEST_NAME).write_text('{"name": "another program wrote it"}')
    model = ResolvedModel(name="m", reference="org/model", folder=str(folder), digest="d" * 64)
    (bundled,) = write(tmp_path / "bundle", [model], options(tmp_path / "cache")).models
    (found,), (lookup,) = resolved(
        options(tmp_path / "none", "org/model", bundle=str(tmp_path / "bundle"))
    )
    assert lookup.is_hit
    assert (found.digest, Path(found.folder).name) == ("d" * 64, bundled.folder)
    assert (folder / MANIFEST_NAME).read_text().startswith('{"name"'), "the original is left alone"
