"""The folder of custom voices: whose they are, what survives, what is set aside."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest, Unavailable
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.modalities.tts.api.voices import record as record_module
from triptych.modalities.tts.api.voices import store as store_module
from triptych.modalities.tts.api.voices.record import VoiceDescription, VoiceFile, check_name
from triptych.modalities.tts.api.voices.store import VoiceQuota, VoiceStore

RATE = 24_000
SOUND_S = np.linspace(-1, 1, 1000, dtype=np.float32)


def about(name: str = "Ada", **fields: Any) -> VoiceDescription:
    return VoiceDescription(name=name, model="parrot", **fields)


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path / "cache" / "voices", VoiceQuota(per_owner=3, in_total=5))


def files(store: VoiceStore, kind: str = "voice") -> list[Path]:
    return sorted(store._root.glob(f"*/*.{kind}"))


def test_what_is_kept_is_read_back(store: VoiceStore) -> None:
    details = about(transcript="Hello.", consent="I agree.", language="en-GB")
    kept = store.add("ada", details, SOUND_S, RATE)
    found = store.read(kept.id, "ada")
    assert found == VoiceFile(kept, SOUND_S.tobytes())
    assert (found.record.about, found.record.sample_rate) == (details, RATE)
    assert store.voices_of("ada") == [kept] == [store.record(kept.id, "ada")]


def test_a_clip_is_named_by_all_that_it_holds(store: VoiceStore) -> None:
    def digest(sound_S: np.ndarray, rate: int, ids: tuple[int, ...]) -> str:
        kept = store.add("ada", about(), sound_S, rate)
        found = store.read(kept.id, "ada")
        store.delete(kept.id, "ada")
        assert found is not None
        clip = found.clip(ids)
        assert (clip.pcm, clip.sample_rate, clip.prompt_ids) == (sound_S.tobytes(), rate, ids)
        return clip.digest

    variants = [(SOUND_S, RATE, (1,)), (-SOUND_S, RATE, (1,)), (SOUND_S, 8000, (1,))]
    variants += [(SOUND_S, RATE, ()), (SOUND_S, RATE, (1, 2))]
    assert len({digest(*variant) for variant in variants}) == len(variants)
    assert digest(*variants[0]) == digest(*variants[0])


def test_voice_belongs_to_its_owner(store: VoiceStore) -> None:
    mine = store.add("ada", about(), SOUND_S, RATE)
    for other in ("", "bob", "ada ", "../ada"):
        assert store.voices_of(other) == []
        assert store.read(mine.id, other) is None
        assert not store.delete(mine.id, other)
    assert store.voices_of("ada") == [mine]


def test_only_the_owner_of_the_process_may_read(store: VoiceStore) -> None:
    store.add("ada", about(), SOUND_S, RATE)
    (file,) = files(store)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store._root, file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]


def test_deleting_removes_the_file(store: VoiceStore) -> None:
    kept = store.add("ada", about(), SOUND_S, RATE)
    assert store.delete(kept.id, "ada")
    assert not store.delete(kept.id, "ada")
    assert store.read(kept.id, "ada") is None
    assert files(store) == []


def test_quotas_hold_and_deleting_makes_room(store: VoiceStore) -> None:
    kept = [store.add("ada", about(), SOUND_S, RATE) for _ in range(3)]
    with pytest.raises(InvalidRequest, match=r"3 voices.*delete one"):
        store.add("ada", about(), SOUND_S, RATE)
    for _ in range(2):
        store.add("bob", about(), SOUND_S, RATE)
    with pytest.raises(Unavailable, match="limit on voices"):
        store.add("eve", about(), SOUND_S, RATE)
    store.delete(kept[0].id, "ada")
    store.add("eve", about(), SOUND_S, RATE)


@pytest.mark.parametrize(
    "voice_id",
    [
        *("", ".", "..", "voice_", "/etc/passwd", "x" * 5000),
        *(f"../voice_{'0' * 32}", f"voice_{'0' * 31}", f"voice_{'G' * 32}"),
        *(f"voice_{'0' * 32}\n", f"voice_{'0' * 32}\0"),
    ],
)
def test_an_id_that_was_not_made_here_names_no_file(store: VoiceStore, voice_id: str) -> None:
    assert store.read(voice_id, "ada") is None
    assert store.record(voice_id, "ada") is None
    assert not store.delete(voice_id, "ada")


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "C:\\con", f"voice_{'0' * 32}", "'; DROP TABLE voices; --"),
        *("%2e%2e%2f", "👩\u200d🚀 Ada 李", "e\u0301", "{{7*7}}", "<script>", "x" * 256),
    ],
)
def test_a_name_is_only_data(store: VoiceStore, name: str) -> None:
    kept = store.add("ada", about(check_name(name)), SOUND_S, RATE)
    assert [found.about.name for found in store.voices_of("ada")] == [check_name(name)]
    assert {path.name for path in store._root.iterdir()} == {".lock", files(store)[0].parent.name}
    assert files(store)[0].name == f"{kept.id}.voice"


@pytest.mark.parametrize(
    "name",
    [
        *("", "  \t", "a\0b", "a\nb", "\x1b[31m", "\u202eevil", "\u2066x", "\u200fx"),
        *("a\u2028b", "\ue000", "x" * 257, "x" * 10_000, "\ufeffx"),
    ],
)
def test_a_name_that_no_list_could_show_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_name(name)
    assert caught.value.param == "name"
    assert len(caught.value.message) < 200


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("at", [0, 9, 13, 20, 60, 150, -1], ids=str)
def test_a_flipped_bit_sets_the_voice_aside(store: VoiceStore, at: int) -> None:
    kept, other = (store.add("ada", about(), SOUND_S, RATE) for _ in range(2))
    (path,) = (path for path in files(store) if path.stem == kept.id)
    damage(path, at)
    assert store.read(kept.id, "ada") is None
    assert store.voices_of("ada") == [other]
    assert [path.stem for path in files(store, "damaged")] == [kept.id]


@pytest.mark.parametrize("num_bytes", [0, 10, 48, 100, -4, -1])
def test_a_file_cut_short_is_set_aside(store: VoiceStore, num_bytes: int) -> None:
    kept = store.add("ada", about(), SOUND_S, RATE)
    (path,) = files(store)
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert store.voices_of("ada") == []
    assert store.read(kept.id, "ada") is None


def test_a_file_under_anothers_name_is_set_aside(store: VoiceStore) -> None:
    store.add("ada", about(), SOUND_S, RATE)
    (path,) = files(store)
    path.rename(path.with_stem("voice_" + "0" * 32))
    assert store.voices_of("ada") == []


def test_failing_disk_is_reported(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.add("ada", about(), SOUND_S, RATE)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Unavailable, match="server's log"):
            store.add("ada", about(), SOUND_S, RATE)
    assert store.voices_of("ada") == [kept]
    store.add("ada", about(), SOUND_S, RATE)
    assert files(store, "partial") == []


class Crash(BaseException):
    """The machine stops."""


STEPS = (
    (record_module.os, "open"),
    (record_module.os, "fsync"),
    (record_module.Path, "rename"),
    (store_module, "flush"),
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "delete", "crash"]),
            st.sampled_from(["ada", "bob"]),
            st.integers(0, 9),
        ),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_whole_voices_remain(steps: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _play(VoiceStore(Path(folder), VoiceQuota(per_owner=4, in_total=6)), steps)


def _play(store: VoiceStore, steps: list[tuple[str, str, int]]) -> None:
    expected: dict[str, list[str]] = {"ada": [], "bob": []}
    for action, owner, n in steps:
        if action == "delete" and expected[owner]:
            voice_id = expected[owner].pop(n % len(expected[owner]))
            assert store.delete(voice_id, owner)
        elif action == "add":
            is_full = len(expected[owner]) == 4 or sum(map(len, expected.values())) == 6
            try:
                expected[owner].append(store.add(owner, about(), SOUND_S, RATE).id)
            except (InvalidRequest, Unavailable):
                assert is_full
        elif action == "crash":
            before = set(expected[owner])
            _crash(store, owner, n)
            after = {record.id for record in store.voices_of(owner)}
            assert before <= after  # a voice that was being added may have made it
            expected[owner] += after - before
        for who, ids in expected.items():
            assert {record.id for record in store.voices_of(who)} == set(ids)
            assert all(store.read(voice_id, who) is not None for voice_id in ids)


def _crash(store: VoiceStore, owner: str, n: int) -> None:
    """Add a voice and stop the machine at the step of that number."""

    def stop(*_: object) -> None:
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*STEPS[n % len(STEPS)], stop)
        with suppress(Crash, InvalidRequest, Unavailable):
            store.add(owner, about(), SOUND_S, RATE)


def test_the_configuration_says_where_and_how_many(tmp_path: Path) -> None:
    config = Config(
        models=ModelOptions(cache_dir=str(tmp_path)), server=ServerOptions(max_voices_per_key=1)
    )
    store = VoiceStore.from_config(config)
    store.add("ada", about(), SOUND_S, RATE)
    with pytest.raises(InvalidRequest):
        store.add("ada", about(), SOUND_S, RATE)
    assert list((tmp_path / "voices").glob("*/*.voice"))
