"""Folders on a disk and in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.core.process import mounts
from triptych.core.process.mounts import is_in_memory


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False)])
def test_the_kind_is_that_of_the_folders_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool
) -> None:
    device = tmp_path.stat().st_dev
    listed = tmp_path / "mountinfo"
    listed.write_text(
        "1 0 999:1 / /other rw - proc proc rw\n"
        f"2 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTS", listed)
    assert is_in_memory(tmp_path) is expected
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "absent")
    assert not is_in_memory(tmp_path)
