"""The import contracts hold for every modality there is, not only for those somebody listed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import triptych

ROOT = Path(__file__).parents[2]


def test_every_modality_is_in_the_contracts_of_its_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {each["name"]: each for each in settings["tool"]["importlinter"]["contracts"]}
    downward = " ".join(contracts["imports run downward"]["layers"]).split()
    halves = next(each for name, each in contracts.items() if name.startswith("a modality:"))
    files = (Path(triptych.__file__).parent / "modalities").glob("*/modality.py")
    modalities = {f"triptych.modalities.{file.parent.name}" for file in files}
    assert len(modalities) >= 6
    assert modalities <= set(downward)
    assert modalities == set(halves["containers"])
