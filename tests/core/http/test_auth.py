"""Keys: who is let in, and as whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.core.errors import ConfigError, Unauthorized
from triptych.core.http.auth import Keyring, Principal, owners
from triptych.core.options.config import ServerOptions


def test_without_keys_everyone_is_the_same_caller() -> None:
    assert Keyring(()).identify("") == Principal(is_admin=True)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer wrong", "one", "Basic one", "Bearer one two"]
)
def test_anything_but_a_known_bearer_key_is_refused(header: str) -> None:
    with pytest.raises(Unauthorized, match="Authorization: Bearer"):
        Keyring(("one", "two")).identify(header)


@pytest.mark.parametrize("header", ["Bearer one", "bearer one", "Bearer  one "])
def test_a_known_key_is_let_in(header: str) -> None:
    assert Keyring(("zero", "one")).identify(header).key


def test_each_key_has_its_own_tenant_and_cache() -> None:
    ring = Keyring(("one", "two"))
    one, two = ring.identify("Bearer one"), ring.identify("Bearer two")
    assert one == ring.identify("Bearer one")
    assert one.key != two.key
    assert one.tenant != two.tenant
    assert "one" not in one.key + one.tenant
    assert Keyring(("one",)).identify("Bearer one").tenant != one.tenant  # salted per process


@pytest.mark.parametrize("is_cache_shared", [False, True])
def test_owner_of_a_key_is_stable_across_runs(is_cache_shared: bool) -> None:
    rings = [Keyring(("one", "two"), is_cache_shared=is_cache_shared) for _ in range(2)]
    ones = {ring.identify("Bearer one").owner for ring in rings}
    twos = {ring.identify("Bearer two").owner for ring in rings}
    assert len(ones) == len(twos) == len(ones ^ twos) - 1 == 1
    assert "" not in ones | twos
    assert owners(ServerOptions(api_key=("one", "two"))) == [*ones, *twos]
    assert owners(ServerOptions()) == [Keyring(()).identify("").owner] == [""]


def test_sharing_the_cache_is_a_choice() -> None:
    options = ServerOptions(api_key=("one", "two"), share_prefix_across_keys=True)
    ring = Keyring.from_options(options)
    assert ring.identify("Bearer one").tenant == ring.identify("Bearer two").tenant == ""


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufefffirst\n# team a\nfrom-file\n\n  padded  \n  # team b\n")
    ring = Keyring.from_options(ServerOptions(api_key=("option",), api_key_file=str(file)))
    for key in ("option", "first", "from-file", "padded"):
        assert ring.identify(f"Bearer {key}")
    for comment in ("# team a", "# team b"):
        with pytest.raises(Unauthorized):
            ring.identify(f"Bearer {comment}")


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", b"\xff\xfe"])
def test_a_key_file_without_keys_never_opens_the_server(
    tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="--api-key-file"):
        Keyring.from_options(ServerOptions(api_key_file=str(file)))


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Keyring.from_options(ServerOptions(api_key=("",)))


def test_every_key_is_compared_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    ring = Keyring(("a", "b", "c"))
    monkeypatch.setattr("triptych.core.http.auth.hmac.compare_digest", compare)
    ring.identify("Bearer a")
    assert len(compared) == 3


def test_an_admin_key_is_a_key_with_more_rights() -> None:
    ring = Keyring(("user",), admin_keys=("boss",))
    assert not ring.identify("Bearer user").is_admin
    assert ring.identify("Bearer boss").is_admin
    with pytest.raises(Unauthorized):
        ring.identify("Bearer other")
    assert Keyring((), admin_keys=("boss",)).has_keys
