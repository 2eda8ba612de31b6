"""No option is declared and then ignored: each is read somewhere outside the option machinery."""

import re
from pathlib import Path

import pytest

from triptych.core.options import declared

ROOT = Path(__file__).parents[2]
MACHINERY = {"config.py", "options.py", "options_doc.py", "refused.py"}


def _sources() -> str:
    folders = (ROOT / "core", ROOT / "schedulers", ROOT / "modalities", ROOT / "src" / "triptych")
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    kept = (path for path in sorted(paths) if path.name not in MACHINERY)
    return "\n".join(path.read_text(encoding="utf-8") for path in kept)


SOURCES = _sources()


@pytest.mark.parametrize("name", sorted(declared()))
def test_option_is_read(name: str) -> None:
    is_read = re.search(rf"\.{name}\b", SOURCES) is not None
    assert is_read, f"nothing reads {name}"
