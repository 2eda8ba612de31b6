"""The cache: built once, by one process, verified each time, rebuilt when damaged."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triptych.core.errors import WeightsError
from triptych.core.weights.cache import WeightsCache, default_cache_dir
from triptych.core.weights.manifest import read_manifest, verify
from triptych.core.weights.progress import SilentProgress

KEY = hashlib.sha256(b"key").hexdigest()


class Builder:
    """Fills a folder and counts how often."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __call__(self, folder: Path) -> None:
        self.folders.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path)


def get(cache: WeightsCache, build: Builder) -> tuple[Path, str]:
    return cache.get(KEY, "here", build, SilentProgress())


def test_second_get_reads_what_the_first_built(cache: WeightsCache) -> None:
    build = Builder()
    folder, digest = get(cache, build)
    assert get(cache, build) == (folder, digest)
    assert len(build.folders) == 1
    assert folder.name == KEY
    manifest = read_manifest(folder)
    assert (manifest.key, manifest.source) == (KEY, "here")
    content = (folder / "model.safetensors").read_bytes()
    assert manifest.files["model.safetensors"].sha256 == hashlib.sha256(content).hexdigest()
    assert manifest.files["model.safetensors"].num_bytes == len(content)


def test_failed_build_leaves_nothing(cache: WeightsCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise WeightsError("no")

    with pytest.raises(WeightsError, match="no"):
        cache.get(KEY, "here", fail, SilentProgress())
    assert cache.entries() == []
    assert get(cache, Builder())[0].is_dir()


def test_crashed_build_is_started_over(cache: WeightsCache) -> None:
    half = cache.models / f"{KEY}.partial"
    half.mkdir(parents=True)
    (half / "stale").write_text("stale")
    folder, _ = get(cache, Builder())
    assert not (folder / "stale").exists()
    assert not half.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_flipped_bit_is_found_wherever_it_is(name: str, cache: WeightsCache) -> None:
    build = Builder()
    folder, digest = get(cache, build)
    good = (folder / name).read_bytes()
    for place in {0, len(good) // 2, len(good) - 1}:
        bad = bytearray(good)
        bad[place] ^= 4
        (folder / name).write_bytes(bad)
        num_builds = len(build.folders)
        assert get(cache, build) == (folder, digest)
        assert len(build.folders) == num_builds + 1
        assert (folder / name).read_bytes() == good
        assert (cache.models / f"{KEY}.corrupt" / name).read_bytes() == bytes(bad)


def test_unexpected_file_is_damage(cache: WeightsCache) -> None:
    folder, _ = get(cache, Builder())
    (folder / "model-2.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"model-2.safetensors is unexpected"):
        verify(folder)


def test_files_in_folders_below_are_sealed_as_well(cache: WeightsCache) -> None:
    def build(folder: Path) -> None:
        Builder()(folder)
        (folder / "part").mkdir()
        (folder / "part" / "config.json").write_text("{}")

    folder, _ = cache.get(KEY, "here", build, SilentProgress())
    assert "part/config.json" in verify(folder).files
    (folder / "part" / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"part/config.json is damaged"):
        verify(folder)


def test_truncation_is_noticed_by_length(cache: WeightsCache) -> None:
    folder, _ = get(cache, Builder())
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsError, match=r"model.safetensors has 5 bytes instead of 16384"):
        verify(folder)


def test_entry_under_a_wrong_key_is_damage(cache: WeightsCache) -> None:
    folder, _ = get(cache, Builder())
    other = hashlib.sha256(b"other").hexdigest()
    folder.rename(cache.models / other)
    build = Builder()
    cache.get(other, "there", build, SilentProgress())
    assert len(build.folders) == 1


def test_two_at_once_build_once(cache: WeightsCache) -> None:
    started, finish, build = threading.Event(), threading.Event(), Builder()

    def slow(folder: Path) -> None:
        started.set()
        assert finish.wait(10)
        build(folder)

    first = threading.Thread(
        target=cache.get, args=(KEY, "here", slow, SilentProgress()), daemon=True
    )
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=get, args=(cache, build), daemon=True)
    second.start()
    finish.set()
    first.join(10)
    second.join(10)
    assert len(build.folders) == 1


def test_lock_of_a_killed_process_is_free(cache: WeightsCache) -> None:
    cache.locks.mkdir(parents=True)
    lock = cache.locks / f"{KEY}.lock"
    script = (
        "import sys, time, filelock; filelock.FileLock(sys.argv[1]).acquire();"
        " print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, lock], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
    assert get(cache, Builder())[0].is_dir()


def test_held_lock_turns_the_cache_off_in_the_end(
    cache: WeightsCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triptych.core.weights.cache.LOCK_TIMEOUT_S", 0.05)
    release, held, build = threading.Event(), threading.Event(), Builder()

    def stuck(folder: Path) -> None:
        held.set()
        assert release.wait(10)

    holder = threading.Thread(
        target=cache.get, args=(KEY, "here", stuck, SilentProgress()), daemon=True
    )
    holder.start()
    assert held.wait(10)
    with caplog.at_level(logging.INFO):
        folder, _ = get(cache, build)
    release.set()
    holder.join(10)
    assert not folder.is_relative_to(cache.models)
    assert "the weights cache is off for this run" in caplog.messages
    verify(folder)


def test_default_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "triptych"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "triptych"
    assert WeightsCache.open(str(tmp_path)).models == tmp_path / "models"
