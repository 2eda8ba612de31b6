"""The tests that `pytest -m gpu` runs: all kernels, and nothing that a bare machine lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from triptych.core.runtime.kernels.triton.compile import kernel_modules

TESTS = Path(__file__).parents[1]
MARK = ".".join(("pytest", "mark", "gpu"))
KERNELS = "triptych.core.runtime.kernels.triton"


def test_every_kernel_is_run_on_a_device() -> None:
    files = [*(TESTS / "core").rglob("test_*.py"), *(TESTS / "modalities").rglob("test_*.py")]
    texts = (file.read_text(encoding="utf-8") for file in files)
    tested = "\n".join(text for text in texts if MARK in text)
    launched = [
        name
        for name in kernel_modules()
        if any(each.startswith("launch") for each in vars(import_module(f"{KERNELS}.{name}")))
    ]
    assert len(launched) > 25
    assert [name for name in launched if not re.search(rf"\b{name}\b", tested)] == []


def test_other_files_are_not_imported_there() -> None:
    """A machine with a device may have neither pytest-asyncio nor what the other tests need."""
    arguments = ["-p", "no:asyncio", "-p", "no:cacheprovider", "-n", "0", "--collect-only", "-q"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", *arguments, str(TESTS / "contract")],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ended.stdout + ended.stderr
    assert "deselected" not in ended.stdout
