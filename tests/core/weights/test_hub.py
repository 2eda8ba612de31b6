"""Models of several parts: which files of a repository are fetched, and what identifies them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import utils as hub_utils
from huggingface_hub.file_download import DryRunFileInfo
from safetensors.torch import save_file

from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights import hub
from triptych.core.weights.hub import needed_files
from triptych.core.weights.hub_progress import missing_bytes
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.overrides import read_overrides
from triptych.core.weights.part_files import identity
from triptych.core.weights.pipeline_index import PipelineIndex, is_part, read_pipeline
from triptych.core.weights.progress import Action, SilentProgress
from triptych.core.weights.resolve import folder_digest
from triptych.core.weights.store import StoredModel, verify_stored

INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.0",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "text_encoder_2": [None, None],
    "is_distilled": True,
}
FILES = [
    *("README.md", "flux1-dev.safetensors", "model_index.json", "evil.py"),
    *("scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt"),
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "transformer/diffusion_pytorch_model.bf16.safetensors",
    "transformer/diffusion_pytorch_model.bin",
    "transformer/onnx/model.safetensors",
    *("text_encoder/config.json", "text_encoder/model.safetensors"),
    *("text_encoder/model.fp16.safetensors", "text_encoder/pytorch_model.bin"),
    "text_encoder/openvino_model.bin",
    *("safety_checker/model.safetensors", "text_encoder_2/model.safetensors"),
]
SMALL = {
    *("model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json"),
    *("tokenizer/merges.txt", "transformer/config.json", "text_encoder/config.json"),
}
SHARDED = {name for name in FILES if "-of-" in name or name.endswith("index.json")}
SHARDED -= {"model_index.json"}


def write_pipeline(folder: Path) -> Path:
    """Parts with one small tensor each."""
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    for part in ("transformer", "text_encoder"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text("{}")
        stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        save_file({"weight": torch.ones(2)}, folder / part / f"{stem}.safetensors")
    for name in ("tokenizer/vocab.json", "scheduler/scheduler_config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def index(tmp_path: Path) -> PipelineIndex:
    return read_pipeline(write_pipeline(tmp_path / "model"))


def test_model_index_names_the_pipeline_class(index: PipelineIndex) -> None:
    assert index.pipeline == "FluxPipeline"
    assert list(index.parts) == ["transformer", "text_encoder", "tokenizer", "scheduler"]
    assert index.facts == {"is_distilled": True}
    assert [part.name for part in index.parts.values() if part.has_weights] == [
        "transformer",
        "text_encoder",
    ]
    assert is_part("text_encoder_4")
    assert not is_part("evil")


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, SHARDED | {"text_encoder/model.safetensors"}),
        ({"dtype": "float16"}, SHARDED | {"text_encoder/model.fp16.safetensors"}),
        (
            {"dtype": "bfloat16"},
            {
                "transformer/diffusion_pytorch_model.bf16.safetensors",
                "text_encoder/model.safetensors",
            },
        ),
        (
            {"model_override": ("text_encoder.quantization_encoding=float16",)},
            SHARDED | {"text_encoder/model.fp16.safetensors"},
        ),
        (
            {"model_override": ("transformer.weight_path=flux.gguf",)},
            {"text_encoder/model.safetensors"},
        ),
    ],
)
def test_one_set_of_weights_is_fetched(
    changes: dict[str, Any], weights: set[str], index: PipelineIndex
) -> None:
    assert set(needed_files(index, FILES, ModelOptions(**changes))) == SMALL | weights


def test_a_part_from_elsewhere_is_not_fetched(index: PipelineIndex) -> None:
    options = ModelOptions(model_override=("transformer.path=/elsewhere",))
    needed = needed_files(index, FILES, options)
    assert not any(name.startswith("transformer/") for name in needed)


def test_a_variant_is_taken_where_there_is_no_other(index: PipelineIndex) -> None:
    files = [name for name in FILES if name not in SHARDED]
    needed = needed_files(index, files, ModelOptions())
    assert "transformer/diffusion_pytorch_model.bf16.safetensors" in needed


def test_a_part_of_pickles_is_refused(index: PipelineIndex) -> None:
    files = [name for name in FILES if not name.startswith("text_encoder/model")]
    with pytest.raises(WeightsError, match=r"text_encoder has no safetensors; .* unsafe format"):
        needed_files(index, files, ModelOptions())


class FakeHub:
    """A repository in a folder; `fetched` are the files that were asked for, call by call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[set[str]] = []

    def list_repo_files(self, repository: str, **_: Any) -> list[str]:
        return FILES

    def snapshot_download(self, repository: str, *, dry_run: bool = False, **asked: Any) -> Any:
        if dry_run:
            kept = DryRunFileInfo("c", 100, "a.safetensors", "", True, False)
            return [kept, *(replace(kept, file_size=size, will_download=True) for size in (7, 4))]
        self._show(asked["tqdm_class"])
        patterns = {key: asked[f"{key}_patterns"] for key in ("allow", "ignore")}
        chosen = hub_utils.filter_repo_objects(
            FILES, allow_patterns=patterns["allow"], ignore_patterns=patterns["ignore"]
        )
        self.fetched.append(set(chosen))
        return str(self.folder)

    def _show(self, kind: Any) -> None:
        """Use bars as the library does."""
        if kind is None:
            return
        for name in ("huggingface_hub.snapshot_download.transfer", *2 * [COUNTED]):
            with kind(name=name, total=0, unit="B", disable=False) as bar:
                bar.update(3)
        assert list(kind([1, 2], desc="Fetching 2 files", total=2)) == [1, 2]


COUNTED = "huggingface_hub.snapshot_download"


class Watch(SilentProgress):
    """Remembers what is reported."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, model: str) -> None:
        self.seen.append(model)

    def start(self, action: Action, total_bytes: int) -> None:
        self.seen.append((action, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.seen.append(num_bytes)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(write_pipeline(tmp_path / "hub"))
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(hub, "list_repo_files", fake.list_repo_files)
    return fake


def test_the_size_is_known_from_the_start_and_nothing_else_is_shown(
    fake_hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache, watch = tmp_path / "cache", Watch()
    options = ModelOptions(model=("org/flux",), cache_dir=str(cache))
    resolve_all(options, watch)
    assert watch.seen == ["org/flux", ("Downloading", 11), 3, 3]
    blobs = cache / "hub" / "models--org--flux" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "weights").write_bytes(bytes(2**20))
    watch.seen.clear()
    resolve_all(options, watch)
    assert watch.seen[1] == ("Downloading", 0), "a later start asks for no sizes"
    assert capfd.readouterr() == ("", "")


def test_a_size_that_cannot_be_known_is_no_error() -> None:
    def download(**_: Any) -> Any:
        raise ConnectionError("offline")

    assert missing_bytes(download) == 0


def test_model_index_is_fetched_first(fake_hub: FakeHub, tmp_path: Path) -> None:
    options = ModelOptions(model=("org/flux",), cache_dir=str(tmp_path / "cache"))
    (model,) = resolve_all(options, SilentProgress())
    assert model.folder == str(fake_hub.folder)
    assert fake_hub.fetched == [
        {"model_index.json"},
        SMALL | SHARDED | {"text_encoder/model.safetensors"},
    ]


def test_a_subfolder_that_is_a_part_of_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "qwen3_tts"}')
    save_file({"weight": torch.ones(2)}, tmp_path / "hub" / "model.safetensors")
    fake = FakeHub(tmp_path / "hub")
    codec = {"speech_tokenizer/config.json", "speech_tokenizer/model.safetensors"}
    own = {"config.json", "merges.txt", "model.safetensors"}
    files = [*codec, *own, "onnx/model.safetensors", "speech_tokenizer/notes.txt"]
    monkeypatch.setattr(f"{__name__}.FILES", files)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    options = ModelOptions(cache_dir=str(tmp_path / "cache"))
    hub.download_snapshot("org/speech", options, progress=SilentProgress())
    assert fake.fetched == [set(), own, codec]


def test_offline_what_was_fetched_must_do(fake_hub: FakeHub, tmp_path: Path) -> None:
    options = ModelOptions(model=("org/flux",), cache_dir=str(tmp_path / "cache"), offline=True)
    (model,) = resolve_all(options, SilentProgress())
    assert model.folder == str(fake_hub.folder)
    assert fake_hub.fetched == [{"model_index.json"}]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model")
    (folder / "tokenizer" / "vocab.json").unlink()
    with pytest.raises(WeightsError, match=r"tokenizer: .* missing or empty"):
        folder_digest(folder, ModelOptions())
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(WeightsError, match="transformer: No model"):
        folder_digest(folder, ModelOptions())


def test_the_digest_follows_the_overrides(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model")
    file = tmp_path / "other.safetensors"
    (tmp_path / "copies").mkdir()
    save_file({"weight": torch.zeros(2)}, file)

    def digest(*overrides: str) -> str:
        options = ModelOptions(
            model=(str(folder),), model_override=overrides, cache_dir=str(tmp_path / "cache")
        )
        return resolve_all(options, SilentProgress())[0].digest

    from_file = f"transformer.weight_path={file}"
    digests = [
        digest(),
        digest(from_file),
        digest(f"transformer.path={folder / 'text_encoder'}"),
        digest("transformer.quantization_encoding=float16"),
    ]
    assert len(set(digests)) == len(digests)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert digest(from_file) == digests[1], "weights that are not used need not be there"
    save_file({"weight": torch.zeros(3)}, file)
    assert digest(from_file) != digests[1]
    copy = shutil.copyfile(file, tmp_path / "copies" / file.name)
    assert digest(f"transformer.weight_path={copy}") == digest(from_file), "wherever it lies"


def test_the_identity_of_another_part_is_what_is_read_of_it(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model")
    other = shutil.copytree(folder / "text_encoder", tmp_path / "other")

    def digest() -> str:
        given = ModelOptions(model_override=(f"text_encoder.path={other}",))
        return identity(read_overrides(given)["text_encoder"], given)

    before = digest()
    (other / "notes.md").write_text("of no use")
    assert digest() == before
    for name in ("merges.txt", "config.json"):
        (other / name).write_text('{"a": 1}')
        assert digest() != before
        before = digest()


def test_overrides_are_for_image_models(tmp_path: Path) -> None:
    local = tmp_path / "text"
    local.mkdir()
    (local / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, local / "model.safetensors")
    options = ModelOptions(
        model=(str(local),), model_override=("transformer.path=x",), cache_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match="for parts of image models, but no image model"):
        resolve_all(options, SilentProgress())


def test_overrides_of_one_part_add_up() -> None:
    given = ("vae.path=a", "vae.weight_path=b=c.gguf", "unet.quantization_encoding=float32")
    read = read_overrides(ModelOptions(model_override=given))
    assert (read["vae"].path, read["vae"].weight_path) == ("a", "b=c.gguf")
    assert read["unet"].quantization_encoding == "float32"


def test_a_stored_pipeline_is_verified_part_by_part(tmp_path: Path) -> None:
    """The hub's cache links to files that are named by their content."""
    folder = write_pipeline(tmp_path / "snapshot")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    blob = tmp_path / sha256_file(file)
    file.rename(blob)
    file.symlink_to(blob)
    stored = StoredModel(
        name="org/flux", kind="hub", key="c", folder=folder, num_bytes=1, is_whole=True
    )
    verify_stored(stored, SilentProgress())
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(WeightsError, match=r"diffusion_pytorch_model\.safetensors is damaged"):
        verify_stored(stored, SilentProgress())
