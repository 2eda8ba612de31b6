"""The models of a start: their order and names; tests of bundles are in test_contents."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.weight_files import write_gguf, write_shards
from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress


def options(folder: Path, **changes: Any) -> ModelOptions:
    return ModelOptions(cache_dir=str(folder / "cache"), **changes)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "local", [{"a": torch.ones(3)}, {"b": torch.zeros(2)}])


def test_resolve_all_names_models_in_order(tmp_path: Path, local: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    opts = options(tmp_path, model=(str(file), f"two={local}"), served_model_name=("one",))
    assert [m.name for m in resolve_all(opts, SilentProgress())] == ["one", "two"]


@pytest.mark.parametrize(
    ("model", "served", "complaint"),
    [
        (("a=embedded", "a=embedded"), (), "'a'.*NAME=REFERENCE"),
        (("a=embedded", "b=embedded"), ("x", "y", "z"), "ALIAS=NAME"),
        (("a=embedded", "b=embedded"), ("c=absent",), "no model of that name"),
        (("a=embedded", "b=embedded"), ("a=b",), "already the name of a model"),
    ],
)
def test_clashing_names_are_refused(
    model: tuple[str, ...], served: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve_all(options(tmp_path, model=model, served_model_name=served), SilentProgress())
