"""A class is found by its name: no two modules of the product define one of the same name."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import triptych

_CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def test_a_class_name_is_in_one_module() -> None:
    root = Path(triptych.__file__).parent
    modules = defaultdict(set)
    for folder in (root, root / "core", root / "schedulers", root / "modalities"):
        paths = folder.glob("*.py") if folder == root else folder.resolve().rglob("*.py")
        for path in paths:
            for name in _CLASS.findall(path.read_text("utf-8")):
                modules[name].add(str(path))
    assert len(modules) > 500, "the whole product was read"
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
