"""The folder and sockets that other users cannot enter."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from triptych.core.errors import ConfigError
from triptych.core.transport.endpoint import OWNER_NAME, SOCKET_NAME, bind_router, private_folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_temporary_folder_is_private_and_goes_away():
    with private_folder("", role="api") as folder:
        assert mode(folder) == 0o700
    assert not folder.exists()


def test_sockets_are_for_the_user_alone():
    with private_folder("", role="api") as folder:
        router = bind_router(folder)
        assert mode(folder / SOCKET_NAME) == 0o600
        router.close()


def test_a_named_folder_is_made_private_and_stays(tmp_path):
    base = tmp_path / "sockets"
    with private_folder(str(base), role="api"):
        assert mode(base) == 0o700
    assert base.exists()


def test_a_folder_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"), private_folder(str(tmp_path), role="api"):
        pass


def test_two_servers_of_a_role_cannot_share_a_folder(tmp_path):
    base = str(tmp_path / "sockets")
    with (
        private_folder(base, role="api"),
        private_folder(base, role="engine"),
        pytest.raises(ConfigError, match="Another server's api"),
        private_folder(base, role="api"),
    ):
        pass
    with private_folder(base, role="api"):
        pass


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    base = str(tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="too long"), private_folder(base, role="api"):
        pass


def test_a_path_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    base = str(tmp_path / "file" / "sockets")
    with pytest.raises(ConfigError, match="cannot be created"), private_folder(base, role="api"):
        pass


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


_DIE = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from triptych.core.transport.endpoint import bind_router, private_folder
with private_folder("", role="api") as folder:
    bind_router(folder)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_process_goes_with_the_next_start(temporary):
    died = subprocess.run([sys.executable, "-c", _DIE, str(temporary)], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert (left / SOCKET_NAME).exists()
    with private_folder("", role="api") as folder:
        assert list(temporary.iterdir()) == [folder]


def test_folders_that_are_in_use_or_not_ours_to_clear_stay(temporary):
    foreign = temporary / "triptych-foreign"  # without a lock
    foreign.mkdir(mode=0o700)
    opened = temporary / "triptych-opened"
    opened.mkdir()
    opened.chmod(0o755)
    (opened / OWNER_NAME).touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / OWNER_NAME).touch()
    (temporary / "triptych-link").symlink_to(elsewhere)
    with private_folder("", role="api") as first, private_folder("", role="api") as second:
        assert first != second
        assert (first / OWNER_NAME).exists()
    kept = {foreign, opened, elsewhere, temporary / "triptych-link"}
    assert set(temporary.iterdir()) == kept
    assert (elsewhere / OWNER_NAME).exists()
