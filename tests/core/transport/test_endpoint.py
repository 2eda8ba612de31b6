"""The folder and sockets nobody else can enter."""

from __future__ import annotations

import stat

import pytest

from triptych.core.errors import ConfigError
from triptych.core.transport.endpoint import SOCKET_NAME, bind_router, private_folder


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
    with pytest.raises(ConfigError, match="cannot be made"), private_folder(base, role="api"):
        pass
