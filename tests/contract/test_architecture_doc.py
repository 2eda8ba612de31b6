"""docs/architecture.md names files that exist, and its drawing shows every room."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LAYERS = ("core", "core/runtime", "schedulers", "modalities", "src/triptych")


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:core|schedulers|modalities|src|tests|docs)/[\w/.]+)`", PAGE)
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_drawing_shows_every_room(tmp_path: Path) -> None:
    code = "import house, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(house.render())"
    made = tmp_path / "house.svg"
    subprocess.run([sys.executable, "-c", code, made], check=True, cwd=ROOT / "docs")
    committed = ROOT / "docs" / "images" / "house.svg"
    rooms = {
        folder.name
        for layer in LAYERS
        for folder in (ROOT / layer).iterdir()
        if (folder / "__init__.py").is_file() and not folder.is_symlink()
    }
    assert len(rooms) > 25
    for drawing in (made.read_text(), committed.read_text()):
        assert not [room for room in rooms if room not in drawing]
